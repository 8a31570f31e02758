"""The hottest shared prefixes against a model that keeps every prompt."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kv_index.hottest import Hottest, Prefix, every, hottest
from kv_index.pages import SYMBOL
from kv_index.radix import RadixIndex

ALL = 1_000_000
Prompt = tuple[int, ...]
SENT = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple),
        st.integers(0, 3),
    ),
    max_size=40,
)


def symbols(prompt: Prompt) -> bytes:
    return b"".join(page.to_bytes(SYMBOL, "big") for page in prompt)


def filled(sent: list[tuple[bytes, Prompt, int]]) -> RadixIndex:
    index = RadixIndex()
    for now, (namespace, prompt, target) in enumerate(sent):
        index.insert(namespace, symbols(prompt), target, float(now))
    return index


def paths(found: Hottest) -> dict[tuple[bytes, bytes], Prefix]:
    """Each prefix by its namespace and all of its symbols."""
    told: dict[tuple[bytes, bytes], Prefix] = {}

    def walk(prefixes: list[Prefix], before: bytes) -> None:
        for prefix in prefixes:
            whole = before + prefix.edge
            assert (prefix.namespace, whole) not in told
            assert prefix.depth * SYMBOL == len(whole)
            told[prefix.namespace, whole] = prefix
            walk(prefix.children, whole)

    walk(found.prefixes, b"")
    return told


def ends(sent: list[tuple[bytes, Prompt, int]], namespace: bytes) -> set[bytes]:
    """Prompts from which no other goes on."""
    prompts = {symbols(prompt) for space, prompt, _ in sent if space == namespace}
    return {one for one in prompts if not any(other != one and other.startswith(one) for other in prompts)}


@given(SENT)
def test_all_of_a_small_index_is_told_as_it_is(sent: list[tuple[bytes, Prompt, int]]) -> None:
    found = hottest(filled(sent), ALL, ALL)
    told = paths(found)
    assert found.whole
    for (namespace, path), prefix in told.items():
        going_on = [end for end in ends(sent, namespace) if end.startswith(path) and end != path]
        assert prefix.whole
        assert prefix.below == len(going_on) >= 2
        latest = {
            target: float(now)
            for now, (space, prompt, target) in enumerate(sent)
            if space == namespace and symbols(prompt).startswith(path)
        }
        assert set(prefix.holders) == set(latest)
        # A prompt that ends inside of an edge uses all of it, as far as the index can tell.
        assert max(latest.values()) <= prefix.used <= len(sent)
    for namespace in (b"a", b"b"):
        leaves = sorted(ends(sent, namespace))
        for one, other in pairwise(leaves):
            shared = 0
            while one[shared : shared + SYMBOL] == other[shared : shared + SYMBOL]:
                shared += SYMBOL
            assert not shared or (namespace, one[:shared]) in told, "where two prompts part is a prefix that they share"


@given(SENT, st.integers(1, 60), st.integers(1, 12))
def test_within_a_budget_nothing_is_told_that_is_not_so(
    sent: list[tuple[bytes, Prompt, int]], budget: int, most: int
) -> None:
    index = filled(sent)
    truth = paths(hottest(index, ALL, ALL))
    found = hottest(index, budget, most)
    told = paths(found)
    assert found.looked <= budget
    assert len(told) <= most
    if found.whole and len(truth) <= most:
        assert set(told) == set(truth)
    for path, prefix in told.items():
        assert path in truth
        assert prefix.holders == truth[path].holders
        assert prefix.below <= truth[path].below
        if prefix.whole:
            assert prefix.below == truth[path].below
    index.check()


def test_the_hottest_comes_first_and_one_wide_node_does_not_hide_the_others() -> None:
    sent: list[tuple[bytes, Prompt, int]] = [(b"wide", (1, 2, n), 0) for n in range(5000)]
    sent += [(b"deep", (*range(50), n), 1) for n in range(1000, 1010)]
    found = hottest(filled(sent), 1000, 10)
    assert found.looked <= 1000
    assert not found.whole
    spaces = [prefix.namespace for prefix in found.prefixes]
    assert spaces == [b"wide", b"deep"]
    wide, deep = found.prefixes
    assert wide.below == 5000, "children that were not looked at are prompts all the same"
    assert not wide.whole
    assert (deep.below, deep.whole, deep.depth) == (10, True, 50)


def test_targets_of_which_nothing_is_believed_hold_nothing() -> None:
    index = filled([(b"a", (1, 2), 0), (b"a", (1, 3), 0), (b"a", (1, 2), 1), (b"b", (1, 2), 1), (b"b", (1, 3), 1)])
    found = hottest(index, ALL, ALL, without={1})
    assert [(prefix.namespace, prefix.holders) for prefix in every(found.prefixes)] == [(b"a", (0,))]


def test_prompts_that_are_only_remembered_count_and_prefixes_that_are_do_not() -> None:
    index = RadixIndex(remember=1 << 20)
    for now in range(40):
        index.insert(b"a", symbols((*range(20), 100 + now, *range(16))), 0, float(now))
        index.insert(b"b", symbols((*range(20), 100 + now, *range(16))), 1, float(now))
    index.set_capacity(0, 100)
    index.clear(1)
    (prefix,) = hottest(index, ALL, ALL).prefixes
    assert (prefix.namespace, prefix.depth, prefix.holders, prefix.below) == (b"a", 20, (0,), 40)


def test_bounds_are_needed() -> None:
    for budget, most in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="positive"):
            hottest(RadixIndex(), budget, most)
    assert hottest(RadixIndex(), 1, 1) == Hottest([], 0, True)
