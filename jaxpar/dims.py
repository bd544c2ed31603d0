"""Union-find, and the classes of dims that must split alike."""

from collections.abc import Hashable


class Unions:
    """Disjoint sets of hashable things."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def add(self, item: Hashable) -> None:
        self._parent.setdefault(item, item)

    def find(self, item: Hashable) -> Hashable:
        self.add(item)
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: Hashable, b: Hashable) -> None:
        self._parent[self.find(b)] = self.find(a)

    def numbered(self) -> dict[Hashable, int]:
        """Per item the number of its set, counted from 0 in order of addition."""
        numbers: dict[Hashable, int] = {}
        return {
            item: numbers.setdefault(self.find(item), len(numbers))
            for item in self._parent
        }
