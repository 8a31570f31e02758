"""A model with recurrent layers: where its hits end, and what vLLM's events say of its states."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from load_tests.engine import EngineOptions
from load_tests.engine.blocks import BlockCache
from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.hybrid import HybridCache
from load_tests.engine.options import OptionError
from load_tests.engine.radix import RadixCache
from load_tests.engine.tokens import tokenize
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import cached
from tests.load_tests.engine.test_events import complete, launch
from tests.load_tests.engine.wiretap import batches, happened


def run(cache: KVCache, tokens: list[int], generated: int = 0) -> int:
    """One sequence, its tokens beyond the prompt computed one by one; its hit."""
    prompt = tokens[: len(tokens) - generated]
    holding = Holding()
    hit = cache.match(holding, prompt)
    assert cache.open(holding, prompt, hit, len(prompt))
    cache.commit(holding, prompt, len(prompt))
    for end in range(len(prompt) + 1, len(tokens)):
        assert cache.grow(holding, tokens, end)
    cache.close(holding, tokens, len(tokens) - 1 if generated else len(tokens))
    return hit


def test_a_state_at_the_last_boundary_of_each_prompt_and_none_while_decoding() -> None:
    """The lengths of a session whose hits a real hybrid engine gave as 0, 448, 768 and 448."""
    cache = HybridCache(BlockCache(400, 64), "boundary", 16)
    first = list(range(506 + 73))
    assert run(cache, first, 73) == 0
    second = [*first, *range(1000, 1194), *range(2000, 2106)]
    assert run(cache, second, 106) == 448
    third = [*second, *range(3000, 3019)]
    assert run(cache, third) == 768
    assert run(cache, [*first[:504], *range(4000, 4320)]) == 448


def test_states_at_exact_ends() -> None:
    """The same session token by token: each step resumes where the one before ended, a new round finds no state."""
    cache = HybridCache(RadixCache(4000), "ends", 16)
    first = list(range(506 + 74))
    assert run(cache, first, 74) == 0
    second = [*first, *range(1000, 1193), *range(2000, 2107)]
    assert run(cache, second, 107) == 579
    assert run(cache, [*second, *range(3000, 3018)]) == 879
    assert run(cache, [*first[:504], *range(4000, 4320)]) == 0
    assert run(cache, first[:506]) == 0, "a prompt's last token is always computed"
    assert run(cache, first[:507]) == 506


@pytest.mark.parametrize("inner", [lambda: BlockCache(100, 4), lambda: RadixCache(400)])
def test_states_at_intervals(inner: Any) -> None:
    cache = HybridCache(inner(), "every:8", 16)
    tokens = list(range(30))
    run(cache, tokens, 13)
    for length, hit in ((8, 0), (9, 8), (16, 8), (17, 16), (25, 24), (30, 24)):
        assert cache.match(Holding(), tokens[:length]) == hit


def test_without_its_kv_a_state_is_no_hit_and_without_its_state_no_kv_is() -> None:
    cache = HybridCache(BlockCache(8, 4), "every:4", 2)
    tokens = list(range(17))
    run(cache, tokens)
    assert len(cache.states) == 2
    assert cache.match(Holding(), tokens) == 16
    assert cache.match(Holding(), tokens[:12]) == 0, "the states at 4 and 8 made room"
    run(cache, list(range(100, 124)))
    assert cache.match(Holding(), tokens) == 0


async def test_an_engine_counts_what_its_states_allow(start: Start, http: aiohttp.ClientSession) -> None:
    plain, hybrid = await start("vllm", block_size=4), await start("vllm", block_size=4, hybrid="boundary")
    prompt = list(range(1, 24))
    for engine, hit in ((plain, 28), (hybrid, 20)):
        answer = await complete(http, engine, prompt, max_tokens=8, ignore_eos=True)
        assert cached(answer) == 0
        text = answer["choices"][0]["text"]
        assert cached(await complete(http, engine, [*prompt, *tokenize(text), 1, 2, 3])) == hit
        assert engine.stats()["kv_blocks_leaked"] == 0


async def test_vllm_has_three_recurrent_groups_before_attention(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, hybrid="boundary")
    await complete(http, engine, list(range(1, 31)), max_tokens=4, ignore_eos=True)
    prompt, decoded = [batch.events for batch in await batches(engine)]
    assert [(event["group_idx"], event["kv_cache_spec_kind"]) for event in prompt] == [
        (0, "mamba"), (1, "mamba"), (2, "mamba"), (3, "full_attention")
    ]  # fmt: skip
    attention = prompt[3]
    assert len(attention["block_hashes"]) == 7
    for event in prompt[:3]:
        assert event["block_hashes"] == attention["block_hashes"][-1:], "one hash, of the last state"
        assert event["token_ids"] == attention["token_ids"] == list(range(1, 29))
        assert (event["block_size"], event["extra_keys"]) == (4, [None])
    for event in decoded[:3]:
        assert event["block_hashes"] == []
        assert len(event["token_ids"]) == 4
        assert event["parent_block_hash"] == attention["block_hashes"][-1]
        assert "extra_keys" not in event
    assert len(decoded[3]["block_hashes"]) == 1


async def test_a_prompt_that_leaves_the_cached_kv_keeps_a_state_there(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await launch(start, hybrid="boundary")
    await complete(http, engine, list(range(1, 31)))
    await complete(http, engine, [*range(1, 18), *range(101, 120)])
    mamba = [event for event in await happened(engine) if event["group_idx"] == 0]
    assert [len(event["token_ids"]) for event in mamba] == [28, 16, 16, 4]
    assert [len(event["block_hashes"]) for event in mamba] == [1, 1, 1, 0]
    assert cached(await complete(http, engine, [*range(1, 18), *range(201, 220)])) == 16


async def test_a_state_that_goes_is_removed_from_every_recurrent_group(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await launch(start, hybrid="boundary", hybrid_states=1)
    await complete(http, engine, [1] * 10)
    await complete(http, engine, [2] * 10)
    events = await happened(engine)
    removed = [event for event in events if event["type"] == "BlockRemoved"]
    assert [event["group_idx"] for event in removed] == [0, 1, 2]
    assert all(event["block_hashes"] == events[0]["block_hashes"] for event in removed)
    async with http.post(engine.url + "/reset_prefix_cache") as answer:
        assert (await answer.json())["success"]
    assert cached(await complete(http, engine, [2] * 10)) == 0


@pytest.mark.parametrize("wrong", ["sometimes", "every:0", "every:x", "every:6"])
def test_wrong_rules_are_named(wrong: str) -> None:
    with pytest.raises(OptionError, match="hybrid"):
        EngineOptions(hybrid=wrong, block_size=4)
