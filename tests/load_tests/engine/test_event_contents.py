"""What KV events say, and when, in each engine's way."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from load_tests.engine.hashes import cbor, sglang_chain, signed, unsigned, vllm_chain
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import post
from tests.load_tests.engine.test_events import complete, launch
from tests.load_tests.engine.wiretap import batches, happened

U64 = 1 << 64


def hashes_of(events: list[Any], kind: str = "BlockStored") -> list[Any]:
    return [each for event in events if event["type"] == kind for each in event["block_hashes"]]


async def reset(http: aiohttp.ClientSession, engine: Engine, path: str) -> None:
    async with http.post(engine.url + path) as answer:
        assert answer.status == 200


def test_vllm_hashes_are_its_own_sha256_cbor() -> None:
    """Digests that real engines computed for tokens 1..8 in blocks of 4."""
    assert sha256(cbor("0")).hexdigest().startswith("4e1195df020de59e"), "the root with PYTHONHASHSEED=0"
    root = sha256(cbor("vllm-none-hash")).digest()
    block = sha256(cbor([root, [1, 2, 3, 4], None])).digest()
    assert block.hex().startswith("58d0879dff3800f6")
    assert unsigned(sha256(cbor([block, [5, 6, 7, 8], None])).digest()) == 0xD43B57DF56B58FB1
    salted = cbor([root, [1, 2, 3, 4], [["cache_salt", "tenant-a"]]])
    assert sha256(salted).hexdigest().startswith("0e172de9010f20a9")


def test_vllm_chains_carry_seed_adapter_and_salt() -> None:
    assert cbor([24, 256, 70_000, 1 << 40]).hex() == "8418181901001a000111701b0000010000000000"
    chain = vllm_chain(0)
    first = chain(b"", [1, 2, 3, 4], "")
    assert len(first) == 32
    assert chain(first, [5, 6, 7, 8], "") != vllm_chain(1)(first, [1, 2, 3, 4], "")
    salted = chain(b"", [1, 2, 3, 4], "\x1ftenant-a")
    assert salted != first
    # The salt is in the first block only; after it the chain carries it.
    assert chain(first, [5], "\x1ftenant-a") == chain(first, [5], "")
    assert chain(first, [5], "adapter\x1f") != chain(first, [5], "")


def test_sglang_hashes_are_its_own_chain() -> None:
    """Numbers that a real engine publishes for tokens 1..8 in pages of 4."""
    chain = sglang_chain(0)
    first = chain(b"", [1, 2, 3, 4], "")
    second = chain(first, [5, 6, 7, 8], "")
    assert signed(first) % U64 == 0xCF97ADEEDB59E05B
    assert signed(second) % U64 == 0x4EBFA8A1F3C34151
    assert sglang_chain(3)(b"", [1, 2, 3, 4], "") != first
    assert len({chain(b"", [1], space) for space in ("", "\x1fs\x1f", "a\x1f\x1f", "\x1f\x1fx")}) == 4


async def test_vllm_stores_a_prompt_at_once_and_what_it_generates_block_by_block(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await launch(start)
    prompt = list(range(1, 11))
    answer = await complete(http, engine, prompt, max_tokens=8, ignore_eos=True)
    found = await batches(engine)
    assert [batch.seq for batch in found] == list(range(len(found)))
    assert [[len(event["block_hashes"]) for event in batch.events] for batch in found] == [[2], [1], [1]]
    first, second, third = (batch.events[0] for batch in found)
    assert first["token_ids"] == prompt[:8]
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert third["parent_block_hash"] == second["block_hashes"][-1]
    assert second["token_ids"][:2] == prompt[8:]
    assert answer["usage"]["completion_tokens"] == 8
    assert {key: value for key, value in first.items() if key not in ("block_hashes", "token_ids")} == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert all(0 <= each < U64 for each in hashes_of([first, second, third]))


async def test_vllm_chunks_are_stored_step_by_step(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, chunk_tokens=6)
    await complete(http, engine, list(range(14)))
    assert [[len(event["token_ids"]) for event in batch.events] for batch in await batches(engine)] == [[4], [8]]


async def test_vllm_says_nothing_of_a_prompt_it_has_unless_asked(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    prompt = list(range(9))
    await complete(http, engine, prompt)
    await complete(http, engine, prompt)
    assert len(await batches(engine)) == 1
    await complete(http, engine, prompt, vllm_xargs={"kv_cache_report_mode": "full"})
    first, again = await batches(engine)
    assert hashes_of(again.events) == hashes_of(first.events)
    assert again.events[0]["parent_block_hash"] is None


async def test_vllm_removes_each_physical_copy_by_an_event_of_its_own(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await launch(start, kv_tokens=64, context_length=64)
    for _ in range(2):
        await complete(http, engine, [7] * 8)
    first, again = await happened(engine)
    assert again["block_hashes"] == first["block_hashes"][-1:], "the last block of a prompt is never reused"
    await complete(http, engine, list(range(63)))
    removed = [event for event in await happened(engine) if event["type"] == "BlockRemoved"]
    assert all(len(event["block_hashes"]) == 1 for event in removed)
    assert sorted(hashes_of(removed, "BlockRemoved")) == sorted(hashes_of([first, again]))
    assert {key: removed[0][key] for key in removed[0] if key != "block_hashes"} == {
        "type": "BlockRemoved",
        "medium": "GPU",
        "group_idx": 0,
    }


async def test_what_is_stored_and_not_removed_is_what_the_cache_holds(
    start: Start, http: aiohttp.ClientSession
) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await launch(start, dialect, kv_tokens=96, context_length=96, max_running=3)
        for name in range(12):
            await complete(http, engine, [name % 5, *range(name % 3 + 20)], max_tokens=9, ignore_eos=True)
        events = await happened(engine)
        assert len(hashes_of(events, "BlockRemoved")) == engine.stats()["evicted_blocks"] > 0
        kept = len(hashes_of(events)) - len(hashes_of(events, "BlockRemoved"))
        assert kept == engine.stats()["kv_blocks_cached"]


async def test_vllm_tells_of_a_reset_with_the_next_step_only(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    await reset(http, engine, "/reset_prefix_cache")
    assert len(await batches(engine)) == 1
    await complete(http, engine, [1] * 5)
    kinds = [event["type"] for event in (await batches(engine))[1].events]
    assert kinds == ["AllBlocksCleared", "BlockStored"]


async def test_vllm_labels_salt_adapter_and_session(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, loras=["ad"])
    await complete(http, engine, [1] * 9, cache_salt="tenant-a", session_id="body")
    await complete(http, engine, [2] * 9, model="ad")
    await complete(http, engine, [2] * 9, model="ad", cache_salt="s")
    headers = {"X-Session-ID": "header"}
    await post(http, engine, "/v1/completions", {"prompt": [3] * 9, "max_tokens": 1}, headers=headers)
    await complete(http, engine, [4] * 9, vllm_xargs={"session_id": "xargs"})
    salted, adapted, both, *labelled = await happened(engine)
    assert salted["extra_keys"] == [["tenant-a"], None]
    assert salted["session_id"] == "body"
    assert (adapted["extra_keys"], adapted["lora_name"]) == ([["ad"], ["ad"]], "ad")
    assert both["extra_keys"] == [["ad", "s"], ["ad"]]
    assert [event["session_id"] for event in labelled] == ["header", "xargs"]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_two_seeds_hash_one_prompt_differently(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    found = []
    for seed in (0, 0, 1):
        engine = await launch(start, dialect, hash_seed=seed)
        await complete(http, engine, [5] * 9)
        found.append(hashes_of(await happened(engine)))
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


async def test_vllm_hashes_can_be_whole_digests(start: Start, http: aiohttp.ClientSession) -> None:
    engine, numbers = await launch(start, event_hashes="bytes"), await launch(start)
    for each in (engine, numbers):
        await complete(http, each, [5] * 9)
    digests = hashes_of(await happened(engine))
    assert all(isinstance(digest, bytes) and len(digest) == 32 for digest in digests)
    assert [unsigned(digest) for digest in digests] == hashes_of(await happened(numbers))


async def test_sglang_stores_when_a_request_ends(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", block_size=1)
    prompt = list(range(1, 8))
    answer = await post(
        http, engine, "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    )
    first, second = await batches(engine)
    (stored,) = first.events
    assert (stored["token_ids"], len(stored["block_hashes"]), stored["block_size"]) == (prompt, 7, 1)
    (grown,) = second.events
    assert grown["token_ids"] == answer["output_ids"][:-1], "the last token has no KV"
    assert grown["parent_block_hash"] == stored["block_hashes"][-1]
    assert set(stored) == {
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"
    }  # fmt: skip
    assert any(each < 0 for each in hashes_of([stored, grown])), "numbers are signed"


async def test_sglang_chunks_are_stored_as_they_end(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", chunk_tokens=6, block_size=1)
    await complete(http, engine, list(range(14)))
    assert [len(event["token_ids"]) for event in await happened(engine)] == [6, 6, 2]


async def test_sglang_hangs_a_branch_on_the_middle_of_what_it_told_before(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await launch(start, "sglang", block_size=1)
    await complete(http, engine, [1, 2, 3, 4, 5])
    await complete(http, engine, [1, 2, 3, 9, 9])
    first, branch = await happened(engine)
    assert branch["parent_block_hash"] == first["block_hashes"][2]
    assert branch["token_ids"] == [9, 9]
    await complete(http, engine, [1, 2, 3, 4, 5])
    assert len(await happened(engine)) == 2, "nothing new to tell"


async def test_sglang_removes_many_pages_by_one_event(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", block_size=1, kv_tokens=32, context_length=32)
    for name in (1, 2, 3):
        await complete(http, engine, [name] * 10)
    await complete(http, engine, [4] * 20)
    removed = [event for event in await happened(engine) if event["type"] == "BlockRemoved"]
    assert len(removed) == 1
    assert len(removed[0]["block_hashes"]) == 20
    assert removed[0]["medium"] == "GPU"
    assert set(removed[0]) == {"type", "block_hashes", "medium"}


async def test_sglang_may_tell_of_a_last_page_that_is_short(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", kv_tokens=32, context_length=32, short_pages=True)
    for _ in range(2):
        await complete(http, engine, list(range(1, 11)))
    whole, short = await happened(engine)
    assert (whole["block_size"], whole["token_ids"]) == (4, list(range(1, 9)))
    assert (short["block_size"], short["token_ids"]) == (2, [9, 10])
    assert short["parent_block_hash"] == whole["block_hashes"][-1]
    await complete(http, engine, list(range(101, 130)))
    removed = hashes_of(await happened(engine), "BlockRemoved")
    assert sorted(removed) == sorted(hashes_of([whole, short]))


async def test_sglang_tells_of_a_flush_at_once(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang")
    await complete(http, engine, [1] * 9)
    await reset(http, engine, "/flush_cache")
    assert (await batches(engine))[-1].events == [{"type": "AllBlocksCleared"}]


async def test_sglang_labels_salt_session_and_adapter(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", block_size=1, loras=["ad"])
    await complete(http, engine, [1] * 3, cache_salt="s", session_id="sess")
    await complete(http, engine, [1] * 3, model="sim:ad")
    salted, adapted = await happened(engine)
    assert (salted["cache_salt"], salted["session_id"]) == ("s", "sess")
    assert adapted["lora_name"] == "ad"
    assert not set(hashes_of([salted])) & set(hashes_of([adapted]))


async def test_sglang_publishes_a_long_decode_late(start: Start, http: aiohttp.ClientSession) -> None:
    """A short answer that ends while a long one decodes is told of with one of the next forty steps."""
    import asyncio

    engine = await launch(start, "sglang", block_size=1, time_scale=0.05)
    long = asyncio.ensure_future(complete(http, engine, [1, 2], max_tokens=400, ignore_eos=True))
    await complete(http, engine, [3, 4], max_tokens=4, ignore_eos=True)
    assert sum(len(event["token_ids"]) for event in await happened(engine)) <= 4
    await long
    assert sum(len(event["token_ids"]) for event in await happened(engine)) == 2 + 399 + 2 + 3
