"""The session of four requests, token by token: the figures come from the real tokenizer, template and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.preparing import Pool, ids_of
from gateway.templates import Template
from gateway.tokens import Tokenizer, TokenMode
from kv_index.blocks import BlockIndex
from kv_index.checkpoints import Checkpoints, Rule
from kv_index.pages import PAGE_TOKENS, chain, names, root
from kv_index.radix import RadixIndex
from tests.qwen import Files
from tests.qwen.session import REQUESTS, body, generated, strangers

PROMPTS = {1: 506, 2: 773, 3: 898, 4: 824}
"""Request -> tokens of its prompt, ..."""
SHARED = {1: 0, 2: 580, 3: 880, 4: 504}
"""... those that are as they were computed for the request before, ..."""
GENERATED = {1: 74, 2: 107, 3: 47}
"""... those that are generated then, and ..."""
COMPUTED = {1: 506, 2: 193, 3: 18, 4: 824}
"""... those that a model with recurrent layers must compute, if its states are kept at both ends of each request."""
STRANGERS = {None: 486, "start": 418, "end": 502}
"""Where the time stands in the system prompts of two other sessions -> tokens that they have in common."""
WORKER = 7


@pytest.fixture(scope="module")
def mode(qwen: Files) -> Iterator[TokenMode]:
    pool = Pool(lambda: 0.0)
    yield TokenMode("qwen3.5", Tokenizer(qwen.tokenizer), Template.load(qwen.template, qwen.tokenizer), pool)
    pool.close()


async def ids(mode: TokenMode, told: dict[str, Any]) -> bytes:
    """The way that a request takes."""
    found = mode.start("chat", json.dumps(told).encode())
    assert found is not None
    return found if isinstance(found, bytes) else await ids_of(found)


def tokens(found: bytes) -> list[int]:
    return memoryview(found).cast("I").tolist()


def common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    pairs = zip(tokens(one), tokens(other), strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)) // 4)


async def session(mode: TokenMode) -> list[tuple[int, bytes, bytes]]:
    """For each request: its number, its prompt, and what was computed when it was answered."""
    found = []
    for request in REQUESTS:
        prompt = await ids(mode, body(request))
        found.append((request, prompt, mode.tokenizer.ids(text(mode, request))))
    return found


def text(mode: TokenMode, request: int) -> str:
    """A request's prompt and its answer."""
    assert mode.template is not None
    return mode.template.render(body(request)) + (generated(mode.template, request) if request in GENERATED else "")


@pytest.mark.parametrize("request_", REQUESTS)
async def test_prompts_have_their_tokens_however_arguments_are_written(mode: TokenMode, request_: int) -> None:
    as_text, as_objects = await ids(mode, body(request_)), await ids(mode, body(request_, objects=True))
    assert len(tokens(as_text)) == PROMPTS[request_]
    assert as_objects == as_text


async def test_thinking_is_rendered_under_both_of_its_names(mode: TokenMode) -> None:
    told = body(3)
    told["messages"] = [
        {"reasoning" if key == "reasoning_content" else key: value for key, value in message.items()}
        for message in told["messages"]
    ]
    assert "reasoning_content" not in json.dumps(told)
    assert await ids(mode, told) == await ids(mode, body(3))


async def test_what_is_generated_follows_the_prompt_token_by_token(mode: TokenMode) -> None:
    assert mode.template is not None
    for request, prompt, whole in await session(mode):
        if request not in GENERATED:
            continue
        new = generated(mode.template, request)
        assert ("<tool_call>" in new) == (request < 3) and new.count("</think>") == 1
        assert prompt + mode.tokenizer.ids(new) == whole
        assert len(tokens(whole)) - len(tokens(prompt)) == GENERATED[request]


async def test_each_request_shares_what_it_should_with_the_one_before(mode: TokenMode) -> None:
    before = b""
    for request, prompt, whole in await session(mode):
        assert common(prompt, before) == SHARED[request], request
        before = whole


@pytest.mark.parametrize("clock", STRANGERS)
async def test_sessions_of_one_agent_share_their_start(mode: TokenMode, clock: str | None) -> None:
    one, other = [await ids(mode, told) for told in strangers(clock)]
    assert common(one, other) == STRANGERS[clock]


async def test_the_tree_of_what_was_sent_finds_it_to_the_page(mode: TokenMode) -> None:
    for start in (0, root(b"somebody")):
        tree = RadixIndex()
        for now, (request, prompt, whole) in enumerate(await session(mode)):
            found = tree.match(b"", chain(prompt, start).symbols).depths
            assert found.get(WORKER, 0) == SHARED[request] // PAGE_TOKENS, request
            tree.insert(b"", chain(whole, start).symbols, WORKER, float(now))
        for clock, shared in STRANGERS.items():
            tree = RadixIndex()
            one, other = [chain(await ids(mode, told), start).symbols for told in strangers(clock)]
            tree.insert(b"", one, WORKER, 0.0)
            assert tree.match(b"", other).depths == {WORKER: shared // PAGE_TOKENS}


@pytest.mark.parametrize("size", [16, 32, 64])
async def test_what_events_tell_is_found_to_the_block(mode: TokenMode, size: int) -> None:
    index = BlockIndex()
    before, held = b"", list[int]()
    for request, prompt, whole in await session(mode):
        found = index.match(chain(prompt).symbols, prompt).tokens
        assert found.get(WORKER, 0) == SHARED[request] // size * size, request
        # It stores what it does not hold, behind what it does. Engines name a block as they like.
        kept = held[: common(prompt, before) // size]
        blocks = len(tokens(whole)) // size
        held = [*kept, *range(1000 * request + len(kept), 1000 * request + blocks)]
        new = tokens(whole)[len(kept) * size : blocks * size]
        assert index.store(WORKER, held[len(kept) :], kept[-1] if kept else None, new, size)
        before = whole


def hybrid(prompts: list[tuple[bytes, bytes]], rule: Rule) -> list[int]:
    """Tokens that a model with recurrent layers must compute of each prompt, given what was computed with it."""
    tree, kept = RadixIndex(), Checkpoints()
    found = []
    for now, (prompt, whole) in enumerate(prompts):
        line = chain(prompt).symbols
        shared = {target: pages * PAGE_TOKENS for target, pages in tree.match(b"", line).depths.items()}
        usable = kept.usable(names(line), shared, prompt).get(WORKER, 0)
        length = len(tokens(prompt))
        found.append(length - usable)
        everything = chain(whole).symbols
        tree.insert(b"", everything, WORKER, float(now))
        resumed = rule.resumed(length, len(tokens(whole)) - length)
        for at in {*rule.positions(length, PAGE_TOKENS), resumed} - {0}:
            kept.put(WORKER, names(everything), at, whole)
    return found


async def test_a_hybrid_model_goes_on_only_from_the_ends_of_requests(mode: TokenMode) -> None:
    prompts = [(prompt, whole) for _, prompt, whole in await session(mode)]
    assert hybrid(prompts, Rule.of("ends")) == list(COMPUTED.values())


async def test_without_states_in_generation_it_goes_on_from_prompts(mode: TokenMode) -> None:
    prompts = [(prompt, whole) for _, prompt, whole in await session(mode)]
    # The first prompt's last boundary is at 496, and the last prompt shares 504.
    assert hybrid(prompts, Rule.of("boundary")) == [506, 773 - 496, 898 - 768, 824 - 496]


async def test_had_the_template_kept_what_was_thought_little_were_to_compute(mode: TokenMode) -> None:
    assert mode.template is not None
    done, following = text(mode, 3), mode.template.render(body(4))
    # Behind the answer the next prompt has the question, and where the model is to go on.
    question = following[following.rindex("<|im_start|>user") :]
    before, prompt = mode.tokenizer.ids(done), mode.tokenizer.ids(done + question)
    assert (common(prompt, before), len(tokens(prompt))) == (945, 959)
    rounds = [(await ids(mode, body(3)), before), (prompt, prompt)]
    assert hybrid(rounds, Rule.of("ends"))[1] == 959 - 945
