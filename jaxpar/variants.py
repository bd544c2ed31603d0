"""The same subject under several choices of rematerialisation."""

from collections.abc import Mapping

from jaxpar.errors import PlanError
from jaxpar.flatten import Path
from jaxpar.plan_json import near
from jaxpar.remat.apply import rematerialised
from jaxpar.remat_choice import Remat
from jaxpar.rewrite import Site
from jaxpar.subject import Subject, relowered


def under(subject: Subject, remat: Remat) -> Subject:
    """The subject with checkpoints as chosen.

    Returns:
        The same object where the choice changes nothing.

    Raises:
        PlanError: if the model has no activation of a name that is to be kept.
    """
    names = _places(subject.sites(), remat) if remat.saved else {}
    traced = rematerialised(subject.traced, remat.level, names)
    return subject if traced is subject.traced else relowered(subject, traced)


def _places(
    sites: Mapping[str, tuple[Site, ...]], remat: Remat
) -> dict[tuple[Path, int, int], str]:
    """Where the values to be kept arise."""
    found: dict[tuple[Path, int, int], str] = {}
    made = {
        name: places
        for name, places in sites.items()
        if any(site.when == "after" for site in places)
    }
    for name in remat.saved:
        if name not in made:
            raise PlanError(
                f"remat: the model makes no value {name!r} that could be kept",
                hint=near(name, made) or "names are the keys of plan.activations",
            )
        for site in made[name]:
            if site.when == "after":
                found[site.path, site.equation, site.slot] = name
    return found
