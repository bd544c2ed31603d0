"""Writes sharding constraints into a traced program.

The jaxpr is edited, never traced again: equations that no constraint touches stay
the objects they were, with their source lines, effects and policies. Places are
addressed by path, since calls of one function share one jaxpr object.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpar.sharding import Spec, axes_of, fits
from jaxpar.user_code import no_mesh

TRANSPARENT = frozenset(
    "jit pjit closed_call core_call checkpoint remat remat2 scan while cond".split()
)
"""Primitives whose bodies can be edited. The bodies of others (custom derivatives,
`shard_map`, kernels) are replaced or hidden when the program is differentiated or
compiled: constrain what goes in and what comes out."""


@dataclass(frozen=True)
class Site:
    """A place in a (nested) jaxpr where a value can be constrained.

    Attributes:
        path: From the root to the innermost jaxpr, per step: index of the equation,
            name of its parameter that holds the jaxpr, index in that parameter if
            it is a tuple (branches of a `cond`), else 0.
        equation: Index of the equation in the innermost jaxpr; -1 for its inputs.
        slot: Index of the result ("after"), operand ("before") or input ("input").
        when: "after": every later use of the result sees the constrained value.
            "before": only this operand does. "input": every use in this jaxpr does.
    """

    path: tuple[tuple[int, str, int], ...]
    equation: int
    slot: int
    when: str


def rewrite(
    closed_jaxpr: ClosedJaxpr,
    constraints: Mapping[Site, tuple[Spec, ...]],
    mesh: Mesh | AbstractMesh,
) -> ClosedJaxpr:
    """The program with its values constrained to lie on the mesh as told.

    Args:
        closed_jaxpr: The program.
        constraints: Per site, one or more specs, applied in order. Inside a scan
            they speak of the values of one iteration. Scalars, literals and results
            that nobody reads have no layout, so constraints on them are left out.
        mesh: Mesh with Auto axes that the specs name.

    Raises:
        ValueError: if the program has no such site, if a site is inside an opaque
            body, or if a spec does not fit its value.
    """
    root = _Edits()
    for site, specs in constraints.items():
        edits = root
        for equation, parameter, index in site.path:
            inner = edits.inside.setdefault(equation, {})
            edits = inner.setdefault((parameter, index), _Edits())
        edits.here[site.when, site.equation, site.slot] = specs
    return closed_jaxpr.replace(jaxpr=_Editor(root, mesh).edit(closed_jaxpr.jaxpr))


@dataclass
class _Edits:
    """Constraints on the values of one jaxpr, and on those of the jaxprs in it."""

    here: dict[tuple[str, int, int], tuple[Spec, ...]] = field(default_factory=dict)
    inside: dict[int, dict[tuple[str, int], "_Edits"]] = field(default_factory=dict)


class _Editor:
    """Edits one jaxpr; `eqns` and `renamed` grow from its first to its last line."""

    def __init__(
        self, edits: _Edits, mesh: Mesh | AbstractMesh, in_branch: bool = False
    ):
        self.edits = edits
        self.mesh = mesh
        self.in_branch = in_branch
        self.eqns: list[JaxprEqn] = []
        self.renamed: dict[Var, Var] = {}

    def edit(self, jaxpr: Jaxpr) -> Jaxpr:
        self.check_sites(jaxpr)
        for slot, var in enumerate(jaxpr.invars):
            self.rename(var, "input", -1, slot, None)
        for index, eqn in enumerate(jaxpr.eqns):
            self.eqns.append(self.edited(index, eqn))
            for slot, var in enumerate(eqn.outvars):
                self.rename(var, "after", index, slot, eqn)
        outvars = [self.current(atom) for atom in jaxpr.outvars]
        return jaxpr.replace(eqns=self.eqns, outvars=outvars)

    def check_sites(self, jaxpr: Jaxpr) -> None:
        slots = {("input", -1): len(jaxpr.invars)}
        for index, eqn in enumerate(jaxpr.eqns):
            slots["before", index] = len(eqn.invars)
            slots["after", index] = len(eqn.outvars)
        for when, equation, slot in self.edits.here:
            if not 0 <= slot < slots.get((when, equation), 0):
                raise ValueError(f"no value {slot} {when!r} equation {equation}")
        for equation in self.edits.inside:
            if not 0 <= equation < len(jaxpr.eqns):
                raise ValueError(f"no equation {equation}")

    def current(self, atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else self.renamed.get(atom, atom)

    def rename(
        self, var: Var, when: str, index: int, slot: int, source: JaxprEqn | None
    ) -> None:
        if specs := self.edits.here.get((when, index, slot)):
            self.renamed[var] = self.constrained(var, specs, source)

    def edited(self, index: int, eqn: JaxprEqn) -> JaxprEqn:
        """The equation on renamed operands, its inner jaxprs edited too."""
        invars = [self.current(atom) for atom in eqn.invars]
        for slot, atom in enumerate(invars):
            if specs := self.edits.here.get(("before", index, slot)):
                invars[slot] = self.constrained(atom, specs, eqn)
        if inner := self.edits.inside.get(index):
            return eqn.replace(invars=invars, params=self.edited_params(eqn, inner))
        unchanged = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        return eqn if unchanged else eqn.replace(invars=invars)

    def edited_params(
        self, eqn: JaxprEqn, inner: Mapping[tuple[str, int], _Edits]
    ) -> dict[str, Any]:
        name = eqn.primitive.name
        if name not in TRANSPARENT:
            raise ValueError(f"the body of {name!r} is opaque: constrain around it")
        params = dict(eqn.params)
        for (parameter, index), edits in inner.items():
            held = params.get(parameter)
            items: list[Any] = list(held) if isinstance(held, tuple) else [held]
            if index >= len(items) or not isinstance(items[index], ClosedJaxpr | Jaxpr):
                raise ValueError(f"{name!r} has no jaxpr {index} in {parameter!r}")
            in_branch = self.in_branch or name == "cond"
            items[index] = _edited_jaxpr(
                items[index], _Editor(edits, self.mesh, in_branch)
            )
            params[parameter] = tuple(items) if isinstance(held, tuple) else items[0]
        return params

    def constrained(
        self, value: Any, specs: Iterable[Spec], source: JaxprEqn | None
    ) -> Any:
        """The value after constraint equations that carry the source's line."""
        if isinstance(value, Literal | DropVar) or not getattr(value.aval, "ndim", 0):
            return value
        for spec in specs:
            sharding = _sharding(spec, value.aval, self.mesh)
            type_ = (value.aval.shape, value.aval.dtype)
            for eqn in _template(*type_, sharding, self.in_branch):
                result = Var(value.aval)
                info = source.source_info if source else eqn.source_info
                self.eqns.append(
                    eqn.replace(invars=[value], outvars=[result], source_info=info)
                )
                value = result
        return value


def _sharding(spec: Spec, aval: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    axes = axes_of(spec)
    named = len(set(axes)) == len(axes) and set(axes) <= set(mesh.shape)
    if not (named and len(spec) == aval.ndim and fits(spec, aval.shape, mesh.shape)):
        raise ValueError(f"spec {spec} does not fit {aval} on {dict(mesh.shape)}")
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def _edited_jaxpr(jaxpr: ClosedJaxpr | Jaxpr, editor: _Editor) -> ClosedJaxpr | Jaxpr:
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr))
    return editor.edit(jaxpr)


@lru_cache(maxsize=4096)
def _template(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, in_branch: bool
) -> list[JaxprEqn]:
    """Constraint equations to copy, so that no private parameter is spelt out.

    What leaves a branch, in the backward pass too, may not be a constraint itself:
    the compiler wants the same one in all branches.
    """

    def constrain(x: jax.Array) -> jax.Array:
        if in_branch:
            return fence(constrain_here(fence(x)))
        return constrain_here(x)

    fence = jax.lax.optimization_barrier
    constrain_here = partial(jax.lax.with_sharding_constraint, shardings=sharding)
    with no_mesh():  # a caller's mesh would become part of the equation
        jaxpr = jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct(shape, dtype))
    return jaxpr.eqns
