"""SGLang's gateway, `cache_aware`: an approximate tree of all prompts, and the least load where that says little.

As its documentation tells it: if the fleet is imbalanced (the most loaded has over `ABSOLUTE` requests more than the least,
and over `RELATIVE` times as many), the least loaded gets the request. Otherwise, if more than `THRESHOLD` of the prompt
matches the tree, the worker that brought the deepest of the matching text; else the least loaded. The tree learns every
prompt. It has a bound, and forgets by age; it does not know what engines hold.

Two things that its program does (version 0.3.2) decide how even a fleet is: who brought a text first stays the one to whom it
leads, whoever got it since; and of several that are least loaded it is always the first in its list that gets the request.
"""

from collections import OrderedDict

from load_tests.simulate.places import Asking
from policies.base import ByLoad, Choice, Fleet, Request, Target

THRESHOLD = 0.3
ABSOLUTE = 64
RELATIVE = 1.5
MOST_CHARACTERS = 1 << 26
CHARACTERS = 4
"""A token's, about: the tree is of text."""


class SglangCacheAware(ByLoad):
    """See the module's head."""

    name = "sglang_cache_aware"
    needs_prefix = True

    def __init__(self) -> None:
        self._tree: OrderedDict[int, int] = OrderedDict()
        """Block -> the worker that brought it."""
        self._most = MOST_CHARACTERS

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads the prompt, and requests in flight."""
        assert isinstance(request, Asking) and request.turn is not None, "a policy of the simulation"
        self._most = MOST_CHARACTERS * len(fleet.targets)
        loads = [target.running for target in fleet.targets]
        most, least = max(loads), min(loads)
        if most - least > ABSOLUTE and most > RELATIVE * least:
            return Choice(_least(fleet), "imbalanced")
        blocks = request.turn.blocks
        depth = 0
        while depth < len(blocks) and blocks[depth] in self._tree:
            depth += 1
        size = request.turn.tokens / max(len(blocks), 1)
        if depth and depth * size / request.turn.tokens > THRESHOLD:
            at = fleet.positions.get(self._tree[blocks[depth - 1]])
            if at is not None:
                return Choice(fleet.targets[at], "prefix")
        return Choice(_least(fleet), "load")

    def committed(self, request: Request, choice: Choice) -> None:
        """The prompt went there."""
        assert isinstance(request, Asking) and request.turn is not None, "a policy of the simulation"
        blocks = request.turn.blocks
        for block in blocks:
            self._tree.setdefault(block, choice.target.id)
            self._tree.move_to_end(block)
        size = CHARACTERS * request.turn.tokens / max(len(blocks), 1)
        while len(self._tree) * size > self._most:
            self._tree.popitem(last=False)


def _least(fleet: Fleet) -> Target:
    return min(fleet.targets, key=lambda target: target.running)
