"""Strict JSON for frozen dataclasses: every error names the key path.

The dataclasses are the schema: a field without a default must be there, a key that
is no field is an error, numbers are finite and never negative. A sharding is
written as JAX users write a PartitionSpec, one entry per dim: `null`, `"axis"` or
`["major axis", "minor axis"]`.
"""

import dataclasses
import difflib
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from jaxpar.errors import PlanError
from jaxpar.sharding import Spec

_LINE_CHARS = 88
_QUOTE_CHARS = 40
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def member(where: str, key: str) -> str:
    """The path of a key: `mesh.data`, `params."a/b"`."""
    name = key if key.isidentifier() else json.dumps(key, ensure_ascii=False)
    return f"{where}.{name}" if where else name


def near(name: str, known: Iterable[str]) -> str:
    """A hint with the known name that was probably meant, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def error(where: str, found: str, hint: str = "") -> PlanError:
    """What is wrong, and at which key path."""
    return PlanError(f"{where}: {found}" if where else found, hint=hint)


class _Object(dict[str, Any]):
    """A JSON object that remembers a key that was written twice."""

    twice: str | None = None

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        if len(self) < len(pairs):
            keys = [key for key, _ in pairs]
            self.twice = next(key for key in keys if keys.count(key) > 1)


def parse(text: str) -> Any:
    """JSON text to plain values.

    Raises:
        PlanError: The text is not JSON; names line and column.
    """
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as problem:
        place = f"line {problem.lineno}, column {problem.colno}"
        raise error(place, f"not JSON: {problem.msg}") from None
    except (ValueError, RecursionError) as problem:
        raise error("", f"not JSON: {problem}") from None


def dumps(value: Any, depth: int = 0, row: bool = False) -> str:
    """JSON text for people: short values and the rows of tables take one line each.

    Args:
        value: Plain values (dict, list, str, int, float, bool, None).
        depth: How many objects and lists are around it.
        row: Whether it is one of many alike, which keeps it on one line.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if row or not value or not isinstance(value, dict | list):
        return line
    items = list(value.values() if isinstance(value, dict) else value)
    records = [isinstance(item, dict) for item in items]
    if depth and not any(records) and len(line) + 2 * depth <= _LINE_CHARS:
        return line
    lines = [dumps(item, depth + 1, bool(depth) and all(records)) for item in items]
    start, end = "[", "]"
    if isinstance(value, dict):
        start, end = "{", "}"
        keys = [json.dumps(key, ensure_ascii=False) for key in value]
        lines = [f"{key}: {text}" for key, text in zip(keys, lines, strict=True)]
    pad = "\n" + "  " * depth
    return f"{start}{pad}  " + f",{pad}  ".join(lines) + pad + end


class Codec(ABC):
    """Values of one type, to and from plain JSON values."""

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """The value as plain JSON values."""

    @abstractmethod
    def decode(self, data: Any, where: str = "") -> Any:
        """Plain JSON values as a value of the type.

        Args:
            data: What `json.loads` gave.
            where: Key path of `data`, for errors.

        Raises:
            PlanError: Anything unknown, missing, of another type or out of range.
        """

    def specs(
        self, value: Any, where: str = "", shape: tuple[int, ...] | None = None
    ) -> Iterator[tuple[str, Spec, tuple[int, ...] | None]]:
        """All shardings inside a value.

        Args:
            value: The value.
            where: Its key path.
            shape: The `shape` field of the dataclass around it, if that has one.

        Yields:
            Key path, spec, and the `shape` field beside it (None without one).
        """
        yield from ()


@cache
def codec(hint: Any) -> Codec:
    """The codec of a type.

    Args:
        hint: A dataclass, `Spec`, `Mapping[str, X]`, `tuple[X, ...]`, `X | None`,
            str, int, float or bool.
    """
    args = get_args(hint)
    if hint == Spec:
        return _Sharding()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _Record(hint)
    if get_origin(hint) is Mapping:
        return _Table(codec(args[1]))
    if get_origin(hint) is tuple:
        return _List(codec(args[0]))
    if NoneType in args:
        return _Optional(codec(next(arg for arg in args if arg is not NoneType)))
    return _Scalar(hint)


class _Record(Codec):
    """A dataclass; its `DERIVED` properties are written, and compared if read."""

    def __init__(self, kind: type):
        missing = dataclasses.MISSING
        fields = dataclasses.fields(kind)
        hints = get_type_hints(kind)
        self.kind = kind
        self.fields = {field.name: codec(hints[field.name]) for field in fields}
        self.required = tuple(
            field.name
            for field in fields
            if field.default is missing and field.default_factory is missing
        )
        self.derived: tuple[str, ...] = getattr(kind, "DERIVED", ())

    def encode(self, value: Any) -> dict[str, Any]:
        parts = self.fields.items()
        own = {key: part.encode(getattr(value, key)) for key, part in parts}
        return own | {key: getattr(value, key) for key in self.derived}

    def decode(self, data: Any, where: str = "") -> Any:
        entries = _object(data, where)
        known = (*self.fields, *self.derived)
        for key in entries:
            if key not in known:
                found = f"unknown key {key!r}; keys are {', '.join(known)}"
                raise error(where, found, near(key, known))
        for key in self.required:
            if key not in entries:
                raise error(where, f"missing key {key!r}")
        record = self.kind(
            **{
                key: part.decode(entries[key], member(where, key))
                for key, part in self.fields.items()
                if key in entries
            }
        )
        for key in self.derived:
            if key in entries:
                _same(getattr(record, key), entries[key], member(where, key))
        return record

    def specs(self, value, where="", shape=None):
        shape = getattr(value, "shape", None)
        for key, part in self.fields.items():
            yield from part.specs(getattr(value, key), member(where, key), shape)


class _Table(Codec):
    """A mapping from text to values of one type."""

    def __init__(self, item: Codec):
        self.item = item

    def encode(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.item.encode(item) for key, item in value.items()}

    def decode(self, data: Any, where: str = "") -> dict[str, Any]:
        return {
            key: self.item.decode(item, member(where, key))
            for key, item in _object(data, where).items()
        }

    def specs(self, value, where="", shape=None):
        for key, item in value.items():
            yield from self.item.specs(item, member(where, key), shape)


class _List(Codec):
    """A tuple of any length, of values of one type."""

    def __init__(self, item: Codec):
        self.item = item

    def encode(self, value: Iterable[Any]) -> list[Any]:
        return [self.item.encode(item) for item in value]

    def decode(self, data: Any, where: str = "") -> tuple[Any, ...]:
        items = _expect(list, "a list", data, where)
        return tuple(self.item.decode(x, f"{where}[{i}]") for i, x in enumerate(items))

    def specs(self, value, where="", shape=None):
        for i, item in enumerate(value):
            yield from self.item.specs(item, f"{where}[{i}]", shape)


class _Optional(Codec):
    """A value of one type, or None."""

    def __init__(self, item: Codec):
        self.item = item

    def encode(self, value: Any) -> Any:
        return None if value is None else self.item.encode(value)

    def decode(self, data: Any, where: str = "") -> Any:
        return None if data is None else self.item.decode(data, where)

    def specs(self, value, where="", shape=None):
        if value is not None:
            yield from self.item.specs(value, where, shape)


class _Sharding(Codec):
    """A spec, written as the entries of a PartitionSpec."""

    _ENTRY = "null, an axis name or a list of axis names"

    def encode(self, value: Spec) -> list[list[str] | str | None]:
        return [(dim[0] if len(dim) == 1 else list(dim)) or None for dim in value]

    def decode(self, data: Any, where: str = "") -> Spec:
        dims = _expect(list, "a list with an entry per dim", data, where)
        return tuple(self._dim(dim, f"{where}[{i}]") for i, dim in enumerate(dims))

    def specs(self, value, where="", shape=None):
        yield where, value, shape

    def _dim(self, data: Any, where: str) -> tuple[str, ...]:
        axes = [] if data is None else [data] if isinstance(data, str) else data
        for axis in _expect(list, self._ENTRY, axes, where):
            _expect(str, self._ENTRY, axis, where)
        return tuple(axes)


class _Scalar(Codec):
    """Text, a truth value or a number; numpy's numbers are written as plain ones."""

    def __init__(self, kind: type):
        self.kind = kind
        self.accepted = (int, float) if kind is int or kind is float else kind

    def encode(self, value: Any) -> Any:
        whole = self.kind is int and float(value).is_integer()
        return int(value) if whole else float(value) if self._number else value

    def decode(self, data: Any, where: str = "") -> Any:
        odd = isinstance(data, bool) is not (self.kind is bool)
        _expect(() if odd else self.accepted, _WORDS[self.kind], data, where)
        if self._number:
            _check_number(data, where)
        if self.kind is int and data != int(data):
            raise error(where, f"expected {_WORDS[int]}, found {_brief(data)}")
        return self.kind(data)

    @property
    def _number(self) -> bool:
        return self.kind in (int, float)


def _check_number(data: float, where: str) -> None:
    if not -sys.float_info.max <= data <= sys.float_info.max:
        raise error(where, f"expected a finite number, found {_brief(data)}")
    if data < 0:
        raise error(where, f"must not be negative, found {_brief(data)}")


def _same(derived: float | None, data: Any, where: str) -> None:
    told = codec(float | None).decode(data, where)
    if derived is None or told is None:
        agrees = derived is told
    else:
        agrees = math.isclose(told, derived, rel_tol=1e-6)
    if not agrees:
        found = f"{_brief(data)}, but the values beside it make {_brief(derived)}"
        raise error(where, found, "correct it, or leave it out")


def _object(data: Any, where: str) -> Mapping[str, Any]:
    entries = _expect(Mapping, "an object", data, where)
    if (twice := getattr(data, "twice", None)) is not None:
        raise error(where, f"key {twice!r} is there twice")
    return entries


def _expect(kind: Any, words: str, data: Any, where: str) -> Any:
    if not isinstance(data, kind):
        raise error(where, f"expected {words}, found {_brief(data)}")
    return data


def _brief(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False, default=repr)
    return text if len(text) <= _QUOTE_CHARS else f"{text[: _QUOTE_CHARS - 3]}..."
