"""Checkpoints against a tiny model: a list of all states that were kept."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, strategies as st

from kv_index.checkpoints import Checkpoints, Rule
from kv_index.pages import PAGE_TOKENS, chain, names


def packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def along(ids: list[int]) -> list[int]:
    return names(chain(packed(ids), 0).symbols)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).flatmap(
    lambda runs: st.integers(0, PAGE_TOKENS - 1).map(
        lambda rest: [tok for run in runs for tok in [run + 1] * 11] + list(range(100, 100 + rest))
    )
)


@given(
    puts=st.lists(st.tuples(st.integers(0, 2), PROMPTS, st.integers(0, 120)), max_size=12),
    gone=st.sets(st.integers(0, 2), max_size=1),
    asked=PROMPTS,
)
def test_the_deepest_state_that_lies_on_the_prompt_is_found(
    puts: list[tuple[int, list[int], int]], gone: set[int], asked: list[int]
) -> None:
    index, model = Checkpoints(), dict[int, list[list[int]]]()
    for place, (target, ids, at) in enumerate(puts):
        if place == len(puts) // 2:
            for each in gone:
                index.clear(each)
                model.pop(each, None)
        at = min(at, len(ids))
        index.put(target, along(ids), at, packed(ids))
        if at >= PAGE_TOKENS:
            model.setdefault(target, []).append(ids[:at])
    shared = dict.fromkeys(range(3), len(asked) // PAGE_TOKENS * PAGE_TOKENS)
    found = index.usable(along(asked), shared, packed(asked))
    for target in range(3):
        fits = [state for state in model.get(target, []) if asked[: len(state)] == state]
        best = max(map(len, fits), default=0)
        told = found.get(target, 0)
        assert told <= best, "a state that is not there"
        # At most four are kept behind one page.
        behind = [state for state in model.get(target, []) if len(state) // PAGE_TOKENS == best // PAGE_TOKENS]
        if len(behind) <= 4:
            assert told == best


@given(ids=PROMPTS, at=st.integers(0, 120), held=st.integers(0, 8))
def test_never_more_than_is_shared_and_a_page(ids: list[int], at: int, held: int) -> None:
    index = Checkpoints()
    at = min(at, len(ids))
    index.put(1, along(ids), at, packed(ids))
    found = index.usable(along(ids), {1: held * PAGE_TOKENS}, packed(ids)).get(1, 0)
    assert found < (held + 1) * PAGE_TOKENS
    assert found in (0, at)


def test_a_state_inside_a_page_needs_the_very_tokens_before_it() -> None:
    index, ids = Checkpoints(), list(range(40))
    index.put(1, along(ids), 40, packed(ids))
    assert index.usable(along([*ids, 7]), {1: 32}, packed([*ids, 7])) == {1: 40}
    other = [*ids[:39], 99, 7]
    assert index.usable(along(other), {1: 32}, packed(other)) == {}
    shorter = ids[:39]
    assert index.usable(along(shorter), {1: 32}, packed(shorter)) == {}


def test_by_text_a_state_counts_from_its_last_whole_page() -> None:
    index = Checkpoints()
    pages = [11, 12, 13, 14]
    index.put(1, pages, 100, page=30.0)
    assert index.usable(pages, {1: 120}, page=30.0) == {1: 90}
    assert index.usable(pages[:3], {1: 90}, page=30.0) == {1: 90}
    assert index.usable(pages[:2], {1: 60}, page=30.0) == {}


def test_a_shallow_holder_does_not_hide_a_deep_one() -> None:
    index, ids = Checkpoints(), list(range(64))
    index.put(1, along(ids), 64, packed(ids))
    index.put(2, along(ids), 32, packed(ids))
    asked = [*ids, 1]
    assert index.usable(along(asked), {1: 64, 2: 64, 3: 64}, packed(asked)) == {1: 64, 2: 32}
    assert index.usable(along(asked), {1: 48, 2: 16}, packed(asked)) == {}


def test_what_is_kept_is_bounded_and_the_latest_stay() -> None:
    index = Checkpoints(most=10)
    prompts = [[at] * 16 for at in range(50)]
    for ids in prompts:
        index.put(1, along(ids), 16, packed(ids))
        index.put(1, along(prompts[0]), 16, packed(prompts[0]))
    assert len(index) == 10
    for at, ids in enumerate(prompts):
        asked = [*ids, 1]
        assert bool(index.usable(along(asked), {1: 16}, packed(asked))) is (at == 0 or at >= 41)
    with pytest.raises(ValueError, match="most"):
        Checkpoints(0)


def test_a_target_that_comes_back_empty_has_none() -> None:
    index, ids = Checkpoints(), list(range(32))
    index.put(1, along(ids), 32, packed(ids))
    index.clear(1)
    assert index.usable(along(ids), {1: 32}, packed(ids)) == {}
    index.put(1, along(ids), 16, packed(ids))
    assert index.usable(along(ids), {1: 32}, packed(ids)) == {1: 16}


@pytest.mark.parametrize(
    "text", ["", "any", "every", "every:", "every:0", "every:-1", "every:1.5", "every:²", "Ends", "ends:4"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not one of"):
        Rule.of(text)


@given(prompt=st.integers(1, 5000), generated=st.integers(0, 5000), block=st.integers(1, 64), every=st.integers(1, 999))
def test_where_states_are_kept(prompt: int, generated: int, block: int, every: int) -> None:
    boundary, ends, steps = Rule.of("boundary"), Rule.of("ends"), Rule.of(f"every:{every}")
    for rule in (boundary, ends, steps):
        at = rule.positions(prompt, block)
        assert at == sorted(set(at))
        assert all(0 < each <= prompt for each in at)
        end = rule.resumed(prompt, generated)
        assert end == 0 or prompt <= end <= prompt + generated
    if prompt > block:
        (kept,) = boundary.positions(prompt, block)
        assert kept % block == 0
        assert prompt - block <= kept < prompt
    assert ends.positions(prompt, block) == [prompt]
    assert steps.positions(prompt, block) == list(range(every, prompt + 1, every))
    assert boundary.resumed(prompt, generated) == 0
    both = Rule(ends=True, boundary=True, every=every).positions(prompt, block)
    assert both == sorted(
        {*ends.positions(prompt, block), *boundary.positions(prompt, block), *steps.positions(prompt, block)}
    )
