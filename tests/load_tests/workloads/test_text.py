"""Words for prompts that are ids of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings, strategies as st

from load_tests.engine.tokens import tokenize
from load_tests.workloads.chains import Chain, Turn
from load_tests.workloads.generators import GENERATORS
from load_tests.workloads.text import begun_block, block_text, prompt_text


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


@settings(max_examples=6, deadline=None)
@given(name=st.sampled_from(["chat", "causal", "tree", "hot_some"]), seed=st.integers(0, 99), data=st.data())
def test_texts_share_exactly_the_blocks_they_share(name: str, seed: int, data: st.DataObject) -> None:
    traffic = GENERATORS[name](1, seed)
    turns = [
        (f"{place}.{number}", turn)
        for place, chain in enumerate(traffic.chains)
        for number, turn in enumerate(chain.turns)
    ]
    drawn = data.draw(st.lists(st.sampled_from(turns), min_size=2, max_size=6, unique_by=lambda each: each[0]))
    texts = [prompt_text(turn, traffic.block, rest).split(" ") for rest, turn in drawn]
    for (_, turn), text in zip(drawn, texts, strict=True):
        assert len(text) == len(tokenize(" ".join(text))) == turn.tokens
    for (_, one), text in zip(drawn, texts, strict=True):
        for (_, other), words in zip(drawn, texts, strict=True):
            if one is not other:
                shared = alike(one.blocks, other.blocks) * traffic.block
                assert shared <= alike(text, words) < shared + traffic.block


def test_an_id_has_its_words_and_no_other_id_has_them() -> None:
    ids = [0, 1, 2, 25, 26, 26**6 - 1, 26**6, 26**6 + 1, 26**12 + 5]
    assert block_text(7, 16) == block_text(7, 16)
    assert len({tuple(block_text(id_, 3).split(" ")) for id_ in ids}) == len(ids)
    assert block_text(26**12 + 5, 2).count(" ") == 1


def test_the_rest_begins_the_block_that_follows() -> None:
    first, second = Turn((0, 1), 40, 9), Turn((0, 1, 2), 50, 9, (3,))
    other = Turn((0, 4, 5), 50, 9)
    assert begun_block(Chain(0, (first, second)), 0) == 2
    assert begun_block(Chain(0, (first, second)), 1) == 3
    assert begun_block(Chain(0, (first, other)), 0) is None
    assert begun_block(Chain(0, (first,)), 0) is None
    assert prompt_text(second, 16, 3).startswith(prompt_text(first, 16, 2))
    assert not prompt_text(second, 16, 3).startswith(prompt_text(first, 16, "own"))


def test_a_prompt_with_few_ids_is_as_long_as_any() -> None:
    words = prompt_text(Turn((0,), 70, 1), 16, "own").split(" ")
    assert len(words) == 70
    assert len({tuple(words[at : at + 16]) for at in range(0, 64, 16)}) == 4
