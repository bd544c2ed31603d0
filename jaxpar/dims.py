"""Union-find, and the classes of dims that must split alike."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Unions(Generic[Item]):
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def add(self, item: Item) -> None:
        """Makes an item known, as a set of its own."""
        self._parent.setdefault(item, item)

    def find(self, item: Item) -> Item:
        """The item that stands for the set of this one."""
        self.add(item)
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: Item, b: Item) -> None:
        """Makes one set of two."""
        self._parent[self.find(b)] = self.find(a)

    def numbered(self) -> dict[Item, int]:
        """Per item the number of its set, counted from 0 in order of addition."""
        numbers: dict[Item, int] = {}
        return {
            item: numbers.setdefault(self.find(item), len(numbers))
            for item in self._parent
        }
