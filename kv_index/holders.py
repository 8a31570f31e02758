"""Who holds which prefix, for all targets: prefix -> bits of the holders, and what was stored behind what.

A holder is one group of one target (`kv_index.groups.Group`), by its bit. Links between prefixes are the same for all, since a
prefix names all that is before it; they tell whether something that goes leaves a hole.
"""

import itertools
from collections.abc import Iterable, Sequence

from kv_index.groups import TIERS, Group, Tier

PRUNE = 64
"""Links behind one prefix after which those that lead nowhere are taken out."""
MEMBERS = 4096
"""Sets of holders that are kept, each once."""


class Holders:
    """See the module's head."""

    def __init__(self) -> None:
        self.by_tier: tuple[dict[int, int], ...] = tuple({} for _ in range(TIERS))
        """Tier -> prefix -> bits of those who hold it."""
        self.links: dict[int, int | set[int]] = {}
        """Prefix -> the prefixes that were stored behind it."""
        self.shifted = False
        """A group got its first hole, or lost its last."""
        self._shared: dict[int, int] = {}
        """Sets of holders, each once: equal integers are one object."""

    def __len__(self) -> int:
        return sum(map(len, self.by_tier))

    def hold(self, group: Group, found: Sequence[int], before: int, tier: Tier) -> Sequence[int]:
        """``group`` holds these prefixes; returns them as the objects that all holders share."""
        holders, bit = self.by_tier[tier], group.bit
        if group.holes:
            self.close(group, found)
        if holders.keys().isdisjoint(found):
            # New to all: nothing but C's own loops.
            holders.update(dict.fromkeys(found, bit))
            if self.links.keys().isdisjoint(found):
                self.links.update(itertools.pairwise(found))
            else:
                for pair in itertools.pairwise(found):
                    self.link(*pair)
            self.link(before, found[0])
            return found
        known = []
        for each in found:
            name = self.link(before, each)
            held = holders.get(name, 0)
            if held & bit:
                group.twins[tier, name] = group.twins.get((tier, name), 0) + 1
            elif held:
                held |= bit
                holders[name] = self._shared.setdefault(held, held)
            else:
                holders[name] = bit
            known.append(name)
            before = name
        return known

    def link(self, before: int, name: int) -> int:
        """``name`` was stored behind ``before``; returns the object for it that is known already, if it is."""
        links = self.links
        known = links.get(before)
        if known is None:
            links[before] = name
        elif isinstance(known, set):
            known.add(name)
            if len(known) >= PRUNE and not len(known) & (len(known) - 1):
                links[before] = {each for each in known if self.held(each)} or {name}
        elif known == name:
            return known
        else:
            links[before] = {known, name}
        return name

    def held(self, name: int) -> bool:
        return any(name in holders for holders in self.by_tier)

    def behind(self, name: int) -> Iterable[int]:
        known = self.links.get(name)
        return () if known is None else known if isinstance(known, set) else (known,)

    def let_go(self, group: Group, name: int, tier: Tier) -> None:
        """``group`` does not hold ``name`` on ``tier`` any more."""
        holders, bit = self.by_tier[tier], group.bit
        held = holders.get(name, 0) & ~bit
        if held:
            holders[name] = self._shared.setdefault(held, held)
        else:
            holders.pop(name, None)
            if not self.held(name) and not any(self.held(each) for each in self.behind(name)):
                self.links.pop(name, None)
        if not tier and not group.gone and any(holders.get(each, 0) & bit for each in self.behind(name)):
            self.hole(group, name)
        if len(self._shared) > MEMBERS:
            self._shared.clear()
        if len(self.links) > PRUNE + 2 * len(self):
            self.links = {
                each: behind
                for each, behind in self.links.items()
                if self.held(each) or any(self.held(one) for one in self.behind(each))
            }

    def hole(self, group: Group, name: int) -> None:
        if not group.holes:
            self.shifted = True
        group.holes.add(name)
        if len(group.holes) >= PRUNE and not len(group.holes) & (len(group.holes) - 1):
            self.recount(group)

    def recount(self, group: Group) -> None:
        """Forget holes that nothing lies behind any more."""
        holders, bit = self.by_tier[0], group.bit
        had = len(group.holes)
        group.holes = {name for name in group.holes if any(holders.get(each, 0) & bit for each in self.behind(name))}
        if had and not group.holes:
            self.shifted = True

    def close(self, group: Group, found: Iterable[int]) -> None:
        group.holes.difference_update(found)
        if not group.holes:
            self.shifted = True
