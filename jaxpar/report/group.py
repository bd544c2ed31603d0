"""Names that differ only in their indices, as one line."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

_INDEX = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


@dataclass(frozen=True)
class Group:
    """Names that are alike in all that matters.

    Attributes:
        label: The common name: "blocks/*/up" where all names of that form are here,
            "blocks/0-3,7/up" where the others differ.
        names: The names, in the order given.
    """

    label: str
    names: tuple[str, ...]


def groups(names: Iterable[str], kind: Callable[[str], Hashable]) -> list[Group]:
    """Groups names that differ in their indices only and are of one kind.

    Args:
        names: Paths, such as "blocks/0/up/kernel".
        kind: What must be equal within a group.

    Returns:
        Groups in the order of their first names.
    """
    found: dict[tuple[str, Hashable], list[str]] = {}
    for name in names:
        found.setdefault((_INDEX.sub("*", name), kind(name)), []).append(name)
    kinds = Counter(form for form, _ in found)
    return [
        Group(_label(members, kinds[form] == 1), tuple(members))
        for (form, _), members in found.items()
    ]


def _label(names: Sequence[str], alone: bool) -> str:
    """The first name, with what varies replaced."""
    columns = zip(*(map(int, _INDEX.findall(name)) for name in names), strict=True)
    values = [sorted(set(column)) for column in columns]
    varies = [("*" if alone and len(v) > 1 else _ranges(v)) for v in values]
    pieces = _INDEX.split(names[0])
    return pieces[0] + "".join(
        index + piece for index, piece in zip(varies, pieces[1:], strict=True)
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
