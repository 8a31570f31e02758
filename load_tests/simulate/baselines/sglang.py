"""SGLang's gateway, `cache_aware`: an approximate tree of all prompts, and the least load where that says little.

As its documentation tells it: if the fleet is imbalanced (the most loaded has over `ABSOLUTE` requests more than the least,
and over `RELATIVE` times as many), the least loaded gets the request. Otherwise, if more than `THRESHOLD` of the prompt
matches the tree, the worker that was last seen at the deepest match; else the least loaded. The tree learns every prompt at
the worker that got it. It has a bound, and forgets by age; it does not know what engines hold.
"""

from collections import OrderedDict

from load_tests.simulate.places import Asking
from policies.base import ByLoad, Choice, Fleet, Request, Target, rendezvous

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
        """Block -> the worker that got it last."""
        self._most = MOST_CHARACTERS

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads the prompt, and requests in flight."""
        assert isinstance(request, Asking) and request.turn is not None, "a policy of the simulation"
        self._most = MOST_CHARACTERS * len(fleet.targets)
        loads = [target.running for target in fleet.targets]
        most, least = max(loads), min(loads)
        if most - least > ABSOLUTE and most > RELATIVE * least:
            return Choice(_least(request, fleet), "imbalanced")
        blocks = request.turn.blocks
        depth = 0
        while depth < len(blocks) and blocks[depth] in self._tree:
            depth += 1
        size = request.turn.tokens / max(len(blocks), 1)
        if depth and depth * size / request.turn.tokens > THRESHOLD:
            at = fleet.positions.get(self._tree[blocks[depth - 1]])
            if at is not None:
                return Choice(fleet.targets[at], "prefix")
        return Choice(_least(request, fleet), "load")

    def committed(self, request: Request, choice: Choice) -> None:
        """The prompt went there."""
        assert isinstance(request, Asking) and request.turn is not None, "a policy of the simulation"
        blocks = request.turn.blocks
        for block in blocks:
            self._tree[block] = choice.target.id
            self._tree.move_to_end(block)
        size = CHARACTERS * request.turn.tokens / max(len(blocks), 1)
        while len(self._tree) * size > self._most:
            self._tree.popitem(last=False)


def _least(request: Request, fleet: Fleet) -> Target:
    fewest = min(target.running for target in fleet.targets)
    return rendezvous(request.draw, [target for target in fleet.targets if target.running == fewest])
