"""Strict reading of TOML tables whose keys carry units.

Every key has to be asked for, every error names the path of its key, and a number
may be written in any unit of its kind: `latency_us = 1` and `latency_s = 1e-6` are
the same.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxpar.errors import MeshError

UNITS: dict[str, dict[str, float]] = {
    "bytes": {
        "bytes": 1,
        "mb": 1e6,
        "gb": 1e9,
        "tb": 1e12,
        "mib": 2**20,
        "gib": 2**30,
    },
    "bytes_per_s": {
        "bytes_per_s": 1,
        "mb_per_s": 1e6,
        "gb_per_s": 1e9,
        "tb_per_s": 1e12,
        "gib_per_s": 2**30,
        "gbit_per_s": 1.25e8,
    },
    "flops_per_s": {
        "flops_per_s": 1,
        "gflops_per_s": 1e9,
        "tflops_per_s": 1e12,
        "pflops_per_s": 1e15,
    },
    "s": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
"""Per kind of quantity, the units that a key may end in and their SI value."""


class StrictTable:
    """One TOML table; `close` complains about keys that nobody read.

    Args:
        values: The table as tomllib gives it.
        where: Name of the file, and the path of the table within it.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._where = where
        self._known: set[str] = set()
        self._children: list[StrictTable] = []

    @classmethod
    def parse(cls, text: str, file: str) -> "StrictTable":
        """The root table of a TOML text; a syntax error is a `MeshError`."""
        try:
            return cls(tomllib.loads(text), f"{file}:")
        except tomllib.TOMLDecodeError as error:
            raise MeshError(f"{file} is not valid TOML: {error}") from error

    def path(self, key: str) -> str:
        """Where a key stands, as errors print it: `pod.toml: links.ici.kind`."""
        return f"{self._where}{' ' if self._where.endswith(':') else '.'}{key}"

    def fail(self, key: str, problem: str, hint: str = "") -> MeshError:
        """The error for one key, for the caller to raise."""
        return MeshError(f"{self.path(key)} {problem}", hint=hint)

    def has(self, key: str) -> bool:
        """Whether an optional key is there."""
        self._known.add(key)
        return key in self._values

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self._get(key, str, "a string")
        if not value.strip():
            raise self.fail(key, "is empty")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of a few words."""
        value = self.text(key)
        if value not in choices:
            raise self.fail(key, f"is {value!r}", f"use one of {', '.join(choices)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return self._list(key, str, "strings")

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._get(key, bool, "true or false")

    def flags(self, key: str) -> tuple[bool, ...]:
        """A list of true and false."""
        return self._list(key, bool, "true or false")

    def count(self, key: str) -> int:
        """A positive integer."""
        value = self._get(key, int, "an integer")
        if value < 1:
            raise self.fail(key, f"is {value}; it must be positive")
        return value

    def counts(self, key: str, entries: int | None = None) -> tuple[int, ...]:
        """A list of positive integers; of that many if entries is given, else some."""
        values = self._list(key, int, "integers")
        if not values and entries is None:
            raise self.fail(key, "is an empty list")
        if entries not in (None, len(values)):
            raise self.fail(key, f"has {len(values)} entries; it takes {entries}")
        for i, value in enumerate(values):
            if value < 1:
                raise self.fail(f"{key}[{i}]", f"is {value}; it must be positive")
        return values

    def fraction(self, key: str) -> float:
        """A number above 0 and at most 1."""
        value = self._number(key, self._get(key, (int, float), "a number"))
        if not 0 < value <= 1:
            raise self.fail(key, f"is {value}; it must be above 0 and at most 1")
        return value

    def quantity(self, stem: str, kind: str, *, zero: bool = False) -> float:
        """A number in SI, from the one key named after the stem and its unit.

        Args:
            stem: What is measured; the key is `{stem}_{unit}`.
            kind: A key of `UNITS`.
            zero: Whether 0 is allowed.
        """
        key, scale = self._unit_key(stem, kind)
        value = self._get(key, (int, float), "a number")
        return self._amount(key, value, zero=zero) * scale

    def quantities(self, stem: str, kind: str) -> dict[str, float]:
        """The same for a table of numbers that share one unit."""
        key, scale = self._unit_key(stem, kind)
        values = self._get(key, dict, "a table")
        return {
            name: self._amount(f"{key}.{name}", value) * scale
            for name, value in values.items()
        }

    def whole_bytes(self, stem: str) -> int:
        """A size in bytes, of at least one."""
        size = int(self.quantity(stem, "bytes"))
        if size < 1:
            raise self.fail(stem, "is less than one byte")
        return size

    def child(self, key: str) -> "StrictTable":
        """A table within this one."""
        child = StrictTable(self._get(key, dict, "a table"), self.path(key))
        self._children.append(child)
        return child

    def children(self, key: str) -> "dict[str, StrictTable]":
        """All tables within a table, by name."""
        parent = self.child(key)
        return {name: parent.child(name) for name in parent._values}

    def close(self) -> None:
        """Refuses keys that were never asked for, here and in the tables within."""
        for key in self._values:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, n=1)
                known = ", ".join(sorted(self._known))
                hint = f"did you mean {close[0]}?" if close else f"known keys: {known}"
                raise self.fail(key, "is not a known key", hint)
        for child in self._children:
            child.close()

    def _get(self, key: str, kind: type | tuple[type, ...], named: str) -> Any:
        self._known.add(key)
        if key not in self._values:
            hint = self._misspelt(key) or f"add it; it is {named}"
            raise self.fail(key, "is missing", hint)
        self._check_type(key, self._values[key], kind, named)
        return self._values[key]

    def _misspelt(self, key: str) -> str:
        """A hint at a key of the file that may be meant for a missing one."""
        unread = [found for found in self._values if found not in self._known]
        near = difflib.get_close_matches(key, unread, n=1)
        return f"is {self.path(near[0])} meant for it?" if near else ""

    def _list(self, key: str, kind: type, named: str) -> tuple[Any, ...]:
        values = self._get(key, list, f"a list of {named}")
        for i, value in enumerate(values):
            self._check_type(f"{key}[{i}]", value, kind, named)
        return tuple(values)

    def _check_type(
        self, key: str, value: Any, kind: type | tuple[type, ...], named: str
    ) -> None:
        # TOML's true is a Python int too, and is never meant as one.
        if not isinstance(value, kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise self.fail(key, f"is {value!r}; it must be {named}")

    def _number(self, key: str, value: float) -> float:
        if not math.isfinite(value):
            raise self.fail(key, f"is {value}; it must be finite")
        return float(value)

    def _amount(self, key: str, value: Any, *, zero: bool = False) -> float:
        self._check_type(key, value, (int, float), "a number")
        number = self._number(key, value)
        if number < 0 or (number == 0 and not zero):
            least = "at least 0" if zero else "positive"
            raise self.fail(key, f"is {value}; it must be {least}")
        return number

    def _unit_key(self, stem: str, kind: str) -> tuple[str, float]:
        units = UNITS[kind]
        keys = [k for k in self._values if k == stem or k.startswith(f"{stem}_")]
        self._known.update(keys or [f"{stem}_{next(iter(units))}"])
        spelt = f"{stem}_ and one of {', '.join(units)}"
        if not keys:
            near = (self._misspelt(f"{stem}_{unit}") for unit in units)
            hint = next(filter(None, near), f"write it as {spelt}")
            raise self.fail(f"{stem}_{next(iter(units))}", "is missing", hint)
        if len(keys) > 1:
            raise self.fail(keys[1], f"says again what {keys[0]} says", "keep one")
        unit = keys[0][len(stem) + 1 :]
        if unit not in units:
            problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
            raise self.fail(keys[0], problem, f"write it as {spelt}")
        return keys[0], units[unit]
