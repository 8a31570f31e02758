"""RadixIndex against a model that keeps, for each target, the set of prefixes it holds."""

import math
from random import Random

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_index.pages import SYMBOL
from kv_index.radix import NODE_BYTES, RadixIndex

TARGETS = st.integers(0, 3)
NAMESPACES = st.sampled_from([b"a", b"b"])
PROMPTS = st.lists(st.integers(0, 2), max_size=40).map(tuple)


def symbols(pages: tuple[int, ...]) -> bytes:
    return b"".join(page.to_bytes(SYMBOL, "big") for page in pages)


class Unbounded(RuleBasedStateMachine):
    """Without a capacity nothing is forgotten unasked: matches equal the model's exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.empty()
        self.ever: set[tuple[bytes, tuple[int, ...]]] = set()
        self.model: dict[int, set[tuple[bytes, tuple[int, ...]]]] = {}
        self.now = 0.0

    def empty(self):
        return RadixIndex()

    def seen(self, namespace, prompt, depths):
        return max(depths.values(), default=0)

    @rule(namespace=NAMESPACES, prompt=PROMPTS, engine=TARGETS)
    def insert(self, namespace, prompt, engine):
        self.now += 1
        self.index.insert(namespace, symbols(prompt), engine, self.now)
        held = self.model.setdefault(engine, set())
        held.update((namespace, prompt[:n]) for n in range(1, len(prompt) + 1))
        self.ever |= held

    @rule(namespace=NAMESPACES, prompt=PROMPTS, engine=TARGETS, keep=st.integers(0, 40))
    def forget(self, namespace, prompt, engine, keep):
        self.index.forget(namespace, symbols(prompt), engine, keep)
        cut = prompt[: keep + 1]
        if keep < len(prompt):
            self.model[engine] = {
                (space, held)
                for space, held in self.model.get(engine, set())
                if space != namespace or held[: len(cut)] != cut
            }

    @rule(engine=TARGETS)
    def remove(self, engine):
        self.index.remove(engine)
        self.model.pop(engine, None)

    @rule(namespace=NAMESPACES, prompt=PROMPTS)
    def match(self, namespace, prompt):
        match = self.index.match(namespace, symbols(prompt))
        expected = {}
        for target, held in self.model.items():
            depth = 0
            while depth < len(prompt) and (namespace, prompt[: depth + 1]) in held:
                depth += 1
            if depth:
                expected[target] = depth
        assert match.depths == expected
        assert match.pages == len(prompt)
        assert match.seen == self.seen(namespace, prompt, expected)

    @invariant()
    def sound(self):
        self.index.check()
        for target in range(4):
            assert self.index.pages(target) == len(self.model.get(target, ()))

    def teardown(self):
        for target in range(4):
            self.index.remove(target)
        self.index.check()
        roots = sum(not node.edge for _, node in self.index.nodes())
        remembered = self.index.remembered_bytes
        assert self.index.bytes == remembered + (roots * NODE_BYTES if remembered else 0), (
            "what holds nothing costs nothing"
        )


class Remembering(Unbounded):
    """The same, and what nobody holds any more was seen all the same."""

    def empty(self):
        return RadixIndex(remember=1 << 20)

    def seen(self, namespace, prompt, depths):
        return max((n for n in range(1, len(prompt) + 1) if (namespace, prompt[:n]) in self.ever), default=0)


class Bounded(RuleBasedStateMachine):
    """With capacities: never more than was put in, never over the bound, pinned prompts stay."""

    def empty(self):
        return RadixIndex(max_bytes=100_000)

    @initialize(capacity=st.integers(20, 80))
    def start(self, capacity):
        self.index = self.empty()
        self.capacity = capacity
        self.given: dict[int, set[tuple[int, ...]]] = {}
        self.pinned: list = []
        self.now = 0.0
        for target in range(4):
            self.index.set_capacity(target, capacity)

    @rule(prompt=PROMPTS, engine=TARGETS, pin=st.booleans(), refer=st.booleans())
    def insert(self, prompt, engine, pin, refer):
        target = engine
        self.now += 1
        place = self.index.insert(b"", symbols(prompt), target, self.now)
        self.given.setdefault(target, set()).update(prompt[:n] for n in range(1, len(prompt) + 1))
        assert self.index.match(b"", symbols(prompt)).depths.get(target, 0) == len(prompt), "the newest is kept"
        if refer:
            self.index.refer(place, target)
        if pin and sum(len(held) for held, _, _ in self.pinned) < self.capacity // 2:
            self.index.pin(place, target)
            self.pinned.append((prompt, target, place))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        at = data.draw(st.integers(0, len(self.pinned) - 1))
        _, target, place = self.pinned.pop(at)
        self.index.unpin(place, target)

    @rule(prompt=PROMPTS)
    def match(self, prompt):
        match = self.index.match(b"", symbols(prompt))
        for target, depth in match.depths.items():
            assert prompt[:depth] in self.given[target]
        assert max(match.depths.values(), default=0) <= match.seen
        assert not match.seen or any(prompt[: match.seen] in given for given in self.given.values())

    @invariant()
    def sound(self):
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert self.index.bytes <= self.index.max_bytes
        for prompt, target, _ in self.pinned:
            assert self.index.match(b"", symbols(prompt)).depths.get(target, 0) == len(prompt), "a pinned prompt stays"
        for target in range(4):
            slack = max([0, *(len(prompt) for prompt, at, _ in self.pinned if at == target)])
            assert self.index.pages(target) <= self.capacity + slack + 40


class BoundedRemembering(Bounded):
    """The same, with little room for what nobody holds any more."""

    def empty(self):
        return RadixIndex(max_bytes=40_000, remember=4_000)


TestRemembering = Remembering.TestCase
TestRemembering.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBoundedRemembering = BoundedRemembering.TestCase
TestBoundedRemembering.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestUnbounded = Unbounded.TestCase
TestUnbounded.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def prompt_of(kind: int, length: int) -> bytes:
    return symbols((kind, *range(1000, 1000 + length - 1)))


def test_the_least_recently_used_goes_first_and_from_its_tail():
    index = RadixIndex()
    index.set_capacity(0, 100)
    for at, kind in enumerate((1, 2, 3)):
        index.insert(b"", prompt_of(kind, 30), 0, float(at))
    index.insert(b"", prompt_of(1, 30), 0, 10.0)
    index.insert(b"", prompt_of(4, 30), 0, 11.0)
    depth = {kind: index.match(b"", prompt_of(kind, 30)).depths.get(0, 0) for kind in (1, 2, 3, 4)}
    assert depth[1] == depth[3] == depth[4] == 30
    assert depth[2] == 10, "twenty pages too many: the oldest prompt loses them from its end"


def test_eviction_on_one_target_leaves_the_others_holdings():
    index = RadixIndex()
    index.set_capacity(0, 40)
    for target in (0, 1):
        index.insert(b"", prompt_of(1, 30), target, 1.0)
    index.insert(b"", prompt_of(2, 30), 0, 2.0)
    depths = index.match(b"", prompt_of(1, 30)).depths
    assert depths == {0: 10, 1: 30}


def test_a_referenced_prompt_outlives_younger_ones_but_not_for_ever():
    index = RadixIndex()
    index.set_capacity(0, 64)
    place = index.insert(b"", prompt_of(1, 30), 0, 0.0)
    index.refer(place, 0)
    index.insert(b"", prompt_of(2, 30), 0, 1.0)
    index.insert(b"", prompt_of(3, 30), 0, 2.0)
    assert index.match(b"", prompt_of(1, 30)).depths == {0: 30}
    assert index.match(b"", prompt_of(2, 30)).depths.get(0, 0) < 30
    index.insert(b"", prompt_of(4, 64), 0, 2000.0)
    assert index.match(b"", prompt_of(1, 30)).depths == {}


def test_a_released_reference_and_an_ended_request_can_be_evicted_again():
    index = RadixIndex()
    index.set_capacity(0, 40)
    place = index.insert(b"", prompt_of(1, 30), 0, 0.0)
    index.pin(place, 0)
    index.refer(place, 0)
    index.insert(b"", prompt_of(2, 30), 0, 1.0)
    assert index.match(b"", prompt_of(1, 30)).depths == {0: 30}
    index.unpin(place, 0)
    index.unrefer(place, 0)
    index.insert(b"", prompt_of(3, 30), 0, 2.0)
    assert index.match(b"", prompt_of(1, 30)).depths.get(0, 0) < 30
    index.check()


def test_a_session_that_grows_stays_one_node():
    index = RadixIndex()
    for turn in range(1, 50):
        index.insert(b"", prompt_of(1, 10 * turn), 0, float(turn))
    assert sum(1 for _ in index.nodes()) == 2
    index.check()


def test_nodes_join_again_when_their_holders_agree():
    index = RadixIndex()
    index.insert(b"", prompt_of(1, 30), 0, 1.0)
    index.insert(b"", prompt_of(1, 20), 1, 2.0)
    assert sum(1 for _ in index.nodes()) == 3
    index.remove(1)
    assert sum(1 for _ in index.nodes()) == 2
    index.check()


def test_namespaces_never_share():
    index = RadixIndex()
    index.insert(b"tenant-a", prompt_of(1, 5), 0, 1.0)
    assert index.match(b"tenant-b", prompt_of(1, 5)).depths == {}


def test_clear_keeps_the_capacity():
    index = RadixIndex()
    index.set_capacity(0, 7)
    index.insert(b"", prompt_of(1, 5), 0, 1.0)
    index.clear(0)
    assert (index.pages(0), index.capacity(0)) == (0, 7)


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError):
        RadixIndex(max_bytes=0)
    with pytest.raises(ValueError):
        RadixIndex().set_capacity(0, -1)


def test_the_heap_does_not_grow_with_use():
    index = RadixIndex()
    for step in range(20_000):
        index.insert(b"", prompt_of(step % 7, 10 + step % 3), step % 2, float(step))
    assert all(len(state.heap) < 9000 for state in index._targets.values())
    assert not math.isinf(index.bytes)
    index.check()


def test_what_others_used_since_is_not_forgotten_with_a_request_that_failed():
    index = RadixIndex()
    shared = prompt_of(1, 20)
    index.insert(b"", shared + prompt_of(2, 5), 0, 1.0)
    index.insert(b"", shared + prompt_of(3, 5), 0, 2.0)
    index.forget(b"", shared + prompt_of(2, 5), 0, 0, used_by=1.0)
    assert index.match(b"", shared + prompt_of(2, 5)).depths == {0: 20}
    assert index.match(b"", shared + prompt_of(3, 5)).depths == {0: 25}
    index.forget(b"", shared + prompt_of(3, 5), 0, 0, used_by=2.0)
    assert index.match(b"", shared).depths == {}
    index.check()


@pytest.mark.parametrize("remember", [0, 1_000, 20_000])
def test_pins_that_come_and_go_under_small_capacities_leave_every_leaf_where_eviction_finds_it(remember):
    """Long random lives, for what shorter ones of the machines above do not reach."""
    for seed in range(60):
        random = Random(seed)
        index = RadixIndex(remember=remember)
        targets = random.choice((2, 3))
        for target in range(targets):
            index.set_capacity(target, random.choice((20, 30, 50)))
        pinned = []
        for now in range(100):
            if pinned and random.random() < 0.35:
                prompt, place, target = pinned.pop(random.randrange(len(pinned)))
                index.unpin(place, target)
            else:
                prompt = symbols(tuple(random.randrange(3) for _ in range(random.randrange(1, 30))))
                target = random.randrange(targets)
                place = index.insert(b"", prompt, target, float(now))
                assert place.parent is not None, "where it ends is in the tree, to be pinned"
                if random.random() < 0.4:
                    index.pin(place, target)
                    pinned.append((prompt, place, target))
            index.check()
            for prompt, _, target in pinned:
                assert index.match(b"", prompt).depths[target] == len(prompt) // SYMBOL, "a pinned prompt stays"
