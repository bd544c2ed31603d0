"""A jaxpr as one flat list of equations, each with the address it came from.

Nested calls are inlined for the search only: a plan is applied to the original
jaxpr, so every equation remembers where in it it stands. Loops become pseudo
equations: "loop_carry" (loop state), "layer_slice" (the slice of a scanned input) and
"layer_stack" (a scanned output); branches meet in a "branch_join".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxpar.rules.rule import ArrayType

Path = tuple[tuple[int, str, int], ...]
Address = tuple[Path, int, int, str]
"""Path to a jaxpr, equation (-1: its inputs), slot, and "before", "after" or
"input"; the fields of `rewrite.Site`."""

OPAQUE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
REMAT = ("checkpoint", "remat", "remat2")
INLINE = ("jit", "pjit", "closed_call", "core_call", *OPAQUE, *REMAT)


@dataclass(frozen=True, slots=True)
class FlatEquation:
    """One equation of the flat list.

    Attributes:
        primitive: Name of the primitive, or of a pseudo equation.
        params: Its parameters.
        operands: Tensor ids, or None for a literal.
        results: Tensor ids.
        place: Path and index of the equation in the traced jaxpr, if it can be
            edited there.
        edges: Where it cannot: places for its operands and results, or None.
        executions: Of one forward pass.
        region: Equations of different regions never cluster.
        recomputed: Whether a checkpoint makes it run again in the backward pass.
        looped: Whether it runs inside a scan.
        saveable: Whether the policy of its checkpoint keeps its results.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    place: tuple[Path, int] | None = None
    edges: tuple[tuple[Address | None, ...], tuple[Address | None, ...]] = ((), ())
    executions: int = 1
    region: int = 0
    recomputed: bool = False
    literals: tuple[Any, ...] = ()
    looped: bool = False
    saveable: bool = False

    def before(self, slot: int) -> Address | None:
        """Where a constraint on one operand alone goes."""
        if self.place is not None:
            return (*self.place, slot, "before")
        return self.edges[0][slot] if self.edges[0] else None

    def after(self, slot: int) -> Address | None:
        """Where a constraint on a result goes."""
        if self.place is not None:
            return (*self.place, slot, "after")
        return self.edges[1][slot] if self.edges[1] else None


@dataclass
class FlatProgram:
    """Equations over numbered tensors.

    Attributes:
        types: Shape and dtype per tensor id.
        equations: In execution order, but for "loop_carry", which reads a later result.
        inputs: Tensor ids of the jaxpr's inputs.
        outputs: Tensor ids of its outputs (None: a literal).
        stacked: Inputs that only a scan reads, slice by slice: input id -> slice id.
        input_sites: Input id -> where a constraint on it (or its slice) goes.
    """

    types: list[ArrayType] = field(default_factory=list)
    equations: list[FlatEquation] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    stacked: dict[int, int] = field(default_factory=dict)
    input_sites: dict[int, Address] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scope:
    """Where the walk stands: in which jaxpr, loop and checkpoint.

    `aliases` maps a variable of an opaque body to the place outside where it can
    be constrained.
    """

    path: Path = ()
    executions: int = 1
    region: int = 0
    recomputed: bool = False
    looped: bool = False
    policy: Callable[..., Any] | None = None
    opaque: Mapping[Any, Address] | None = None


def flatten(closed: ClosedJaxpr) -> FlatProgram:
    """Inlines every nested jaxpr; see the module's docstring."""
    walk = _Walk()
    program = walk.program
    env = {v: walk.new(v.aval) for v in closed.jaxpr.invars}
    env |= {v: walk.new(v.aval) for v in closed.jaxpr.constvars}
    program.inputs = [env[v] for v in closed.jaxpr.invars]
    program.input_sites = {
        t: ((), -1, i, "input") for i, t in enumerate(program.inputs)
    }
    walk.body(closed.jaxpr, env, _Scope())
    program.outputs = [walk.read(env, a) for a in closed.jaxpr.outvars]
    _alias_stacked_inputs(program)
    return program


class _Walk:
    def __init__(self) -> None:
        self.program = FlatProgram()
        self.regions = 0

    def new(self, aval: Any) -> int:
        self.program.types.append(ArrayType(tuple(aval.shape), aval.dtype))
        return len(self.program.types) - 1

    def like(self, tensor: int) -> int:
        self.program.types.append(self.program.types[tensor])
        return len(self.program.types) - 1

    @staticmethod
    def read(env: Mapping[Any, int], atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else env.get(atom)

    def body(self, jaxpr: Jaxpr, env: dict[Any, int], scope: _Scope) -> None:
        for index, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            if name == "scan":
                self.scan(eqn, index, env, scope)
            elif name == "while":
                self.while_loop(eqn, index, env, scope)
            elif name == "cond":
                self.cond(eqn, index, env, scope)
            elif name in INLINE:
                self.call(eqn, index, env, scope)
            else:
                self.leaf(eqn, index, env, scope)

    def leaf(self, eqn: Any, index: int, env: dict[Any, int], scope: _Scope) -> None:
        results = tuple(self.new(v.aval) for v in eqn.outvars)
        for var, tensor in zip(eqn.outvars, results, strict=True):
            env[var] = tensor
        place = (scope.path, index) if scope.opaque is None else None
        edges: Any = ((), ())
        if scope.opaque is not None:
            at = scope.opaque.get
            edges = (
                tuple(None if isinstance(v, Literal) else at(v) for v in eqn.invars),
                tuple(at(v) for v in eqn.outvars),
            )
        self.program.equations.append(
            FlatEquation(
                eqn.primitive.name,
                eqn.params,
                tuple(self.read(env, a) for a in eqn.invars),
                results,
                place,
                edges,
                scope.executions,
                scope.region,
                scope.recomputed,
                tuple(_literal(a) for a in eqn.invars if isinstance(a, Literal)),
                scope.looped,
                _keeps(scope.policy, eqn),
            )
        )

    def pseudo(
        self,
        kind: str,
        operands: Sequence[int | None],
        result: int,
        scope: _Scope,
        site: Address | None = None,
        **params: Any,
    ) -> None:
        self.program.equations.append(
            FlatEquation(
                kind,
                params,
                tuple(operands),
                (result,),
                None,
                ((None,) * len(operands), (site,)),
                scope.executions,
                scope.region,
                scope.recomputed,
            )
        )

    def call(self, eqn: Any, index: int, env: dict[Any, int], scope: _Scope) -> None:
        inner, key = _inner_jaxpr(eqn)
        jaxpr, consts = _open(inner)
        name = eqn.primitive.name
        child = replace(scope, path=(*scope.path, (index, key, 0)))
        if name in REMAT:
            self.regions += 1
            policy = eqn.params.get("policy")
            child = replace(child, region=self.regions, recomputed=True, policy=policy)
        if name in OPAQUE and scope.opaque is None:
            child = replace(child, opaque=self._boundary(eqn, index, jaxpr, scope))
        inner_env: dict[Any, int] = {v: self.new(c) for v, c in consts}
        for var, atom in zip(jaxpr.invars, eqn.invars, strict=True):
            tensor = self.read(env, atom)
            inner_env[var] = self.new(var.aval) if tensor is None else tensor
        self.body(jaxpr, inner_env, child)
        self._bind(eqn, jaxpr, inner_env, env)

    def _bind(self, eqn: Any, jaxpr: Jaxpr, inner: dict, env: dict[Any, int]) -> None:
        for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            tensor = self.read(inner, atom)
            env[var] = self.new(var.aval) if tensor is None else tensor

    def _boundary(
        self, eqn: Any, index: int, jaxpr: Jaxpr, scope: _Scope
    ) -> dict[Any, Address]:
        """Where inputs and outputs of an opaque body can be constrained."""
        known: dict[Any, Address] = {}
        for i, var in enumerate(jaxpr.invars):
            known[var] = (scope.path, index, i, "before")
        for i, atom in enumerate(jaxpr.outvars):
            if not isinstance(atom, Literal):
                known.setdefault(atom, (scope.path, index, i, "after"))
        return known

    def scan(self, eqn: Any, index: int, env: dict[Any, int], scope: _Scope) -> None:
        params = eqn.params
        jaxpr, consts = _open(params["jaxpr"])
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        self.regions += 1
        path = (*scope.path, (index, "jaxpr", 0))
        body = replace(
            scope,
            path=path,
            executions=scope.executions * params["length"],
            region=self.regions,
            looped=True,
        )
        inner: dict[Any, int] = {v: self.new(c) for v, c in consts}
        carries: list[tuple[int | None, int, int]] = []
        for i, (var, atom) in enumerate(zip(jaxpr.invars, eqn.invars, strict=True)):
            outer = self.read(env, atom)
            if i < n_consts:
                inner[var] = self.new(var.aval) if outer is None else outer
                continue
            inner[var] = self.new(var.aval)
            if i < n_consts + n_carry:
                carries.append((outer, inner[var], i))
            else:
                site = (path, -1, i, "input")
                self.pseudo("layer_slice", [outer], inner[var], body, site)
        self.body(jaxpr, inner, body)
        self._scan_results(eqn, inner, env, carries, body)

    def _scan_results(
        self,
        eqn: Any,
        inner: dict[Any, int],
        env: dict[Any, int],
        carries: list[tuple[int | None, int, int]],
        body: _Scope,
    ) -> None:
        jaxpr, _ = _open(eqn.params["jaxpr"])
        for j, (init, carry, slot) in enumerate(carries):
            out = self.read(inner, jaxpr.outvars[j])
            site = (body.path, -1, slot, "input")
            self.pseudo("loop_carry", [init, out], carry, body, site)
            env[eqn.outvars[j]] = carry
        for j in range(len(carries), len(eqn.outvars)):
            var = eqn.outvars[j]
            env[var] = self.new(var.aval)
            out = self.read(inner, jaxpr.outvars[j])
            self.pseudo("layer_stack", [out], env[var], body)

    def while_loop(
        self, eqn: Any, index: int, env: dict[Any, int], scope: _Scope
    ) -> None:
        """One pass through condition and body: the trip count is not known."""
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        outer = [self.read(env, a) for a in eqn.invars]
        init = outer[n_cond + n_body :]
        carry = [self.new(v.aval) for v in eqn.outvars]
        parts = (
            ("cond_jaxpr", outer[:n_cond]),
            ("body_jaxpr", outer[n_cond : n_cond + n_body]),
        )
        out: list[int | None] = []
        path: Path = ()
        for key, consts in parts:
            self.regions += 1
            path = (*scope.path, (index, key, 0))
            child = replace(scope, path=path, region=self.regions)
            jaxpr, const_values = _open(params[key])
            inner: dict[Any, int] = {v: self.new(c) for v, c in const_values}
            for var, tensor in zip(jaxpr.invars, [*consts, *carry], strict=True):
                inner[var] = self.new(var.aval) if tensor is None else tensor
            self.body(jaxpr, inner, child)
            out = [self.read(inner, a) for a in jaxpr.outvars]
        for j, var in enumerate(eqn.outvars):
            site = (path, -1, n_body + j, "input")
            self.pseudo("loop_carry", [init[j], out[j]], carry[j], scope, site)
            env[var] = carry[j]

    def cond(self, eqn: Any, index: int, env: dict[Any, int], scope: _Scope) -> None:
        outcomes: list[list[int | None]] = []
        for b, branch in enumerate(eqn.params["branches"]):
            self.regions += 1
            path = (*scope.path, (index, "branches", b))
            jaxpr, consts = _open(branch)
            inner: dict[Any, int] = {v: self.new(c) for v, c in consts}
            for var, atom in zip(jaxpr.invars, eqn.invars[1:], strict=True):
                tensor = self.read(env, atom)
                inner[var] = self.new(var.aval) if tensor is None else tensor
            self.body(jaxpr, inner, replace(scope, path=path, region=self.regions))
            outcomes.append([self.read(inner, a) for a in jaxpr.outvars])
        for j, var in enumerate(eqn.outvars):
            env[var] = self.new(var.aval)
            site = (scope.path, index, j, "after")
            self.pseudo("branch_join", [o[j] for o in outcomes], env[var], scope, site)


def _inner_jaxpr(eqn: Any) -> tuple[Any, str]:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key], key
    raise KeyError(f"{eqn.primitive.name} has no jaxpr among {list(eqn.params)}")


def _open(jaxpr: Any) -> tuple[Jaxpr, list[tuple[Any, Any]]]:
    """The jaxpr, and its constants with their types."""
    if isinstance(jaxpr, ClosedJaxpr):
        inner = jaxpr.jaxpr
        return inner, [(v, v.aval) for v in inner.constvars]
    return jaxpr, []


def _keeps(policy: Callable[..., Any] | None, eqn: Any) -> bool:
    """Whether a checkpoint's policy keeps (or offloads) what an equation makes."""
    if policy is None:
        return False
    kept = policy(eqn.primitive, *(a.aval for a in eqn.invars), **eqn.params)
    return bool(kept) and type(kept).__name__ != "RecomputeType"


def _literal(atom: Any) -> Any:
    value = atom.val
    return value if isinstance(value, bool | int | float) else str(value)


def _alias_stacked_inputs(program: FlatProgram) -> None:
    """An input that only one scan reads stands for its own slice."""
    readers: dict[int, list[FlatEquation]] = {}
    for eqn in program.equations:
        for tensor in dict.fromkeys(eqn.operands):
            if tensor is not None:
                readers.setdefault(tensor, []).append(eqn)
    aliased: set[int] = set()
    kept = set(program.outputs)
    for tensor in program.inputs:
        found = readers.get(tensor, [])
        if (
            len(found) == 1
            and found[0].primitive == "layer_slice"
            and tensor not in kept
        ):
            program.stacked[tensor] = found[0].results[0]
            program.input_sites[tensor] = found[0].after(0) or ((), -1, 0, "input")
            aliased.add(id(found[0]))
    program.equations = [e for e in program.equations if id(e) not in aliased]


def producers(equations: Sequence[FlatEquation]) -> Iterator[tuple[int, int]]:
    """Pairs of tensor id and index of the equation that writes it."""
    for index, eqn in enumerate(equations):
        for tensor in eqn.results:
            yield tensor, index
