"""The hottest prefixes that prompts share, as a tree: what is worth most of all that the index holds.

The index may have millions of nodes, so it is walked best first and within a budget: next is always the node below which
most could be shared, its depth times its children. What was not walked is still counted, as the least that it can be: each
child of a node is a prompt at least. Prompts that nobody holds any more count while the index remembers them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from kv_index.pages import SYMBOL
from kv_index.radix import Node, RadixIndex

WIDEST = 8
"""Part of the budget, as its divisor, that the children of one node may cost: others are to be seen too."""


@dataclass(slots=True, eq=False)
class Prefix:
    """A prefix that at least two prompts share."""

    namespace: bytes
    edge: bytes
    """Symbols that it adds to its parent's."""
    depth: int
    """Pages from the start of its prompts to its end."""
    holders: tuple[int, ...]
    """Targets that are believed to hold all of it, the latest to use it first."""
    used: float
    """When it, or what goes on from it, was last used."""
    below: int = 0
    """Prompts that go on from it, held or remembered, at least."""
    whole: bool = True
    """Whether those are all."""
    children: list["Prefix"] = field(default_factory=list)

    @property
    def pages(self) -> int:
        """That it adds to its parent's."""
        return len(self.edge) // SYMBOL


class Hottest(NamedTuple):
    """What a walk found."""

    prefixes: list[Prefix]
    """Those without a parent, the hottest first; their `Prefix.children` too."""
    looked: int
    """Nodes that were looked at."""
    whole: bool
    """Whether those are all that there are."""


class _Place:
    """A node with children, on the walk."""

    __slots__ = ("below", "depth", "namespace", "node", "parent", "whole")

    def __init__(self, namespace: bytes, node: Node, parent: "_Place | None", depth: int) -> None:
        self.namespace, self.node, self.parent, self.depth = namespace, node, parent, depth
        # Until it is looked at.
        self.below, self.whole = len(node.children or ()), False

    @property
    def heat(self) -> int:
        return self.depth * len(self.node.children or ())


def hottest(index: RadixIndex, budget: int, most: int, without: Collection[int] = ()) -> Hottest:
    """The ``most`` hottest prefixes, by walking ``budget`` nodes at most. Changes nothing.

    ``without``: targets of which nothing is believed; a prefix that nobody else holds is left out.
    """
    if budget <= 0 or most <= 0:
        raise ValueError("budget and most must be positive")
    places: list[_Place] = []
    todo: list[tuple[int, int, _Place]] = []
    looked = 0
    widest = max(1, budget // WIDEST)

    def found(place: _Place) -> None:
        places.append(place)
        # Roots have no depth, and are all to be looked at before anything else.
        heappush(todo, (-place.heat if place.parent is not None else -(1 << 62), len(places), place))

    skipped = False
    for namespace, root in index.roots():
        if looked == budget:
            skipped = True
            break
        looked += 1
        found(_Place(namespace, root, None, 0))
    while todo and looked < budget:
        place = heappop(todo)[2]
        children = place.node.children or {}
        room = min(budget - looked, widest)
        place.whole = len(children) <= room
        place.below = max(0, len(children) - room)
        for child in islice(reversed(children.values()), room):
            looked += 1
            if child.children:
                found(_Place(place.namespace, child, place, place.depth + len(child.edge) // SYMBOL))
            else:
                place.below += 1
    for place in reversed(places):
        if place.parent is not None:
            place.parent.below += place.below
            place.parent.whole = place.parent.whole and place.whole
    complete = not skipped and all(place.whole for place in places if place.parent is None)
    return Hottest(_tree(places, most, frozenset(without)), looked, complete)


def _tree(places: list[_Place], most: int, without: frozenset[int]) -> list[Prefix]:
    """The best of them, each below its parent."""
    below: dict[_Place, list[_Place]] = {}
    for place in places:
        if place.parent is not None and place.below > 1:
            below.setdefault(place.parent, []).append(place)
    tops: list[Prefix] = []
    todo: list[tuple[int, int, _Place, list[Prefix]]] = []
    serial = 0

    def offer(parent: _Place, into: list[Prefix]) -> None:
        nonlocal serial
        for place in below.get(parent, ()):
            serial += 1
            heappush(todo, (-_worth(place), serial, place, into))

    for place in places:
        if place.parent is None:
            offer(place, tops)
    count = 0
    while todo and count < most:
        _, _, place, into = heappop(todo)
        prefix = _prefix(place, without)
        if prefix.holders:
            count += 1
            into.append(prefix)
            offer(place, prefix.children)
    return tops


def _worth(place: _Place) -> int:
    """Pages that prompts below it need not compute for it."""
    return len(place.node.edge) // SYMBOL * place.below


def _prefix(place: _Place, without: frozenset[int]) -> Prefix:
    held = [(used, target) for target, used in place.node.held.items() if target not in without]
    held.sort(reverse=True)
    holders = tuple(target for _, target in held)
    used = held[0][0] if held else 0.0
    return Prefix(place.namespace, place.node.edge, place.depth, holders, used, place.below, place.whole)


def every(prefixes: list[Prefix]) -> Iterator[Prefix]:
    """All of a tree, parents before their children."""
    todo = list(reversed(prefixes))
    while todo:
        prefix = todo.pop()
        yield prefix
        todo.extend(reversed(prefix.children))
