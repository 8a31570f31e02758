"""Token ids: incremental ones are those of the whole text, in bounded memory; and the pool in which they are made."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer as Fast,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gateway import preparing
from gateway.preparing import FAILED, FAILED_FOR, INLINE, PENDING, Pool, Unrendered, ids_of
from gateway.templates import Template
from gateway.tokens import Tokenizer, TokenMode
from tests.qwen import Files

# -- small tokenizers of every make ---------------------------------------------------------------------------------

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im", "<|im_start|>!", "[x] (y)*")
"""Some are the beginnings of others, and some would mean something to a regular expression."""
LESSONS = [
    "The quick brown fox jumps over the lazy dog, and it's 3.14 metres away.\n\n",
    '{"name": "web_search", "arguments": {"query": "weather in Paris"}}\n',
    "def f(x):\n        return x + 1\n",
    "你好，世界。北京今天的最高气温是多少？",
]


def added(tokenizer: Fast, **how: bool) -> Fast:
    """``how``: of two of them, which is enough."""
    for token in SPECIAL:
        odd = how if "think" in token else {}
        tokenizer.add_tokens([AddedToken(token, special=token.startswith("<|"), **{"normalized": False, **odd})])
    return tokenizer


def byte_level(prefix: bool = False) -> Fast:
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LESSONS, trainer)
    return tokenizer


def metaspace(scheme: str) -> Fast:
    tokenizer = Fast(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(LESSONS, trainer)
    return tokenizer


def sentences() -> Fast:
    """As Llama 2's was converted: a mark in front of each piece of text."""
    tokenizer = metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def composing() -> Fast:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def around(tokenizer: Fast, form: str) -> Fast:
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    return tokenizer


def cutting() -> Fast:
    """One that a request is cut and filled by, unless told not to."""
    tokenizer = added(byte_level())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    return tokenizer


MAKES: dict[str, tuple[Callable[[], Fast], bool]] = {
    "bytes": (lambda: added(byte_level()), True),
    "bytes, none special": (byte_level, True),
    "bytes, a space in front": (lambda: added(byte_level(prefix=True)), True),
    "bytes, composed": (lambda: added(composing()), True),
    "truncating, padding": (cutting, True),
    "begin": (lambda: around(added(byte_level()), "<|im_start|> $A"), True),
    "begin and end": (lambda: around(added(byte_level()), "<|im_start|> $A <|im_end|> <|im_end|>"), True),
    "a mark in front of all": (lambda: added(metaspace("always")), True),
    "a mark in front of pieces": (lambda: added(sentences()), True),
    "a mark in front of the first": (lambda: added(metaspace("first")), False),
    "a mark in front of the first, begin": (lambda: around(added(metaspace("first")), "<|im_start|> $A"), False),
    "left": (lambda: added(byte_level(), lstrip=True), False),
    "right": (lambda: added(byte_level(), rstrip=True), False),
    "words": (lambda: added(byte_level(), single_word=True), False),
    "normalized": (lambda: added(composing(), normalized=True), False),
}
"""Name -> how it is made, and whether its text may be cut at special tokens."""


@cache
def made(name: str) -> tuple[str, Fast]:
    """The text of its file, and the tokenizer itself, which is the witness."""
    tokenizer = MAKES[name][0]()
    text = tokenizer.to_str()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return text, tokenizer


def loaded(name: str, **more: int) -> Tokenizer:
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(made(name)[0], encoding="utf-8")
        return Tokenizer(str(path), **more)


@cache
def ours(name: str) -> Tokenizer:
    return loaded(name)


def listed(found: bytes) -> list[int]:
    assert sys.byteorder == "little"
    return memoryview(found).cast("I").tolist()


def whole(tokenizer: Fast, text: str, special: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=special).ids


PIECES = st.one_of(
    st.sampled_from(SPECIAL),
    st.sampled_from(
        ["<|im_start", "|>", "<", " ", "  ", "\n", "\n\n", "\t", "▁", "'s", "e\u0301", "\u0301", "\u200d", "🇨🇳"]
    ),
    st.sampled_from(LESSONS),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.parametrize("name", MAKES)
@given(text=TEXTS, again=TEXTS)
def test_ids_are_those_of_the_whole_text(name: str, text: str, again: str) -> None:
    tokenizer, witness = ours(name), made(name)[1]
    # The third text is made of pieces that are known by then.
    for each in (text, again, text + again):
        assert listed(tokenizer.ids(each)) == whole(witness, each)
        assert listed(tokenizer.ids(each, special=True)) == whole(witness, each, special=True)


@given(text=st.lists(st.one_of(PIECES, st.sampled_from(["<tool_call>", "<|endoftext|>"])), max_size=12).map("".join))
def test_ids_of_the_real_tokenizer_are_those_of_the_whole_text(real: tuple[Tokenizer, Fast], text: str) -> None:
    tokenizer, witness = real
    assert listed(tokenizer.ids(text)) == whole(witness, text)
    assert listed(tokenizer.ids(text, special=True)) == whole(witness, text, special=True)


@pytest.fixture(scope="module")
def real(qwen: Files) -> tuple[Tokenizer, Fast]:
    return Tokenizer(qwen.tokenizer), Fast.from_file(qwen.tokenizer)


@pytest.mark.parametrize("name", MAKES)
def test_a_tokenizer_that_cannot_be_cut_is_found_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "warmroute"):
        loaded(name)
    assert ("does not split" in caplog.text) is not MAKES[name][1]


def test_the_real_tokenizer_can_be_cut(qwen: Files, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "warmroute"):
        Tokenizer(qwen.tokenizer)
    assert not caplog.text


@pytest.mark.parametrize("name", ["bytes", "a mark in front of the first"])
def test_what_is_kept_is_bounded(name: str) -> None:
    tokenizer, witness = loaded(name, kept=20_000), made(name)[1]
    tracemalloc.start()
    try:
        for number in range(3000):
            tokenizer.ids(f"<|im_start|>a text like no other, number {number}<|im_end|>")
            assert 0 < tokenizer.size <= 20_000
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 3000 of them would be half a megabyte.
    assert held < 100_000
    assert listed(tokenizer.ids("number 1<|im_end|>")) == whole(witness, "number 1<|im_end|>")


def test_a_text_larger_than_the_bound_is_not_kept() -> None:
    tokenizer, witness = loaded("bytes", kept=2000), made("bytes")[1]
    for text in ("short", 1000 * "long ", "short", 1000 * "long "):
        assert listed(tokenizer.ids(text)) == whole(witness, text)
        assert tokenizer.size <= 2000


def test_threads_get_the_same_ids() -> None:
    tokenizer, witness = loaded("bytes", kept=4000), made("bytes")[1]
    texts = [f"<|im_start|>user\n{number % 7} of {number}<|im_end|><think>" for number in range(60)]
    expected = [whole(witness, text) for text in texts]
    begin = threading.Barrier(4)

    def work(turn: int) -> bool:
        begin.wait(30)
        order = [(at * 7 + turn * 13) % len(texts) for at in range(len(texts))]
        return all(listed(tokenizer.ids(texts[at])) == expected[at] for at in order for _ in range(3))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [True] * 4
    assert 0 < tokenizer.size <= 4000


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "not JSON", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer(str(path))
    with pytest.raises(ValueError, match="is no tokenizer"):
        Tokenizer(str(tmp_path))


# -- requests -------------------------------------------------------------------------------------------------------

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
BULK = "x" * INLINE
"""More than is done at once."""


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def pool(clock: list[float]) -> Iterator[Pool]:
    pool = Pool(lambda: clock[0])
    yield pool
    pool.close()


@pytest.fixture
def mode(pool: Pool) -> TokenMode:
    return TokenMode("m", ours("begin and end"), Template(PLAIN), pool)


def chat(content: str, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


async def ids(mode: TokenMode, kind: str, body: bytes) -> list[int]:
    found = mode.start(kind, body)
    assert found is not None
    return listed(found if isinstance(found, bytes) else await ids_of(found))


async def refused(mode: TokenMode, kind: str, body: bytes) -> str:
    """The reason."""
    with pytest.raises(Unrendered) as caught:
        await ids(mode, kind, body)
    return caught.value.reason


@pytest.mark.parametrize("content", ["short", BULK])
async def test_a_chat_has_the_ids_of_what_is_rendered_and_no_others(mode: TokenMode, content: str) -> None:
    text = f"<|im_start|>user\n{content}<|im_end|>"
    assert await ids(mode, "chat", chat(content)) == whole(made("begin and end")[1], text)


@pytest.mark.parametrize("kind", ["completions", "generate"])
@pytest.mark.parametrize("name", ["prompt", "text"])
@pytest.mark.parametrize("content", ["", "Once <|im_end|> upon", BULK])
async def test_a_plain_text_has_the_tokens_around_it_too(mode: TokenMode, kind: str, name: str, content: str) -> None:
    witness = made("begin and end")[1]
    for told in (content, [content]):
        for asked in ({}, {"add_special_tokens": True}, {"add_special_tokens": None}):
            body = json.dumps({name: told, **asked}).encode()
            assert await ids(mode, kind, body) == whole(witness, content, special=True)
        body = json.dumps({name: told, "add_special_tokens": False}).encode()
        assert await ids(mode, kind, body) == whole(witness, content)


@pytest.mark.parametrize("kind", ["embeddings", "responses", "messages", "", "stored"])
async def test_other_kinds_have_none(mode: TokenMode, kind: str) -> None:
    assert mode.start(kind, chat("x")) is None
    assert mode.start(kind, b"no JSON") is None


DEEP = b'{"messages": ' + 100_000 * b"[" + 100_000 * b"]" + b"}"


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": NaN}', DEEP, DEEP[:-1]]
)
async def test_a_body_that_is_no_object_has_none(mode: TokenMode, kind: str, body: bytes) -> None:
    reason = await refused(mode, kind, body)
    assert reason == ("body" if body != DEEP or reason == "body" else "messages")


@pytest.mark.parametrize("told", [None, [], ["a", "b"], [1, 2, 3], [[1, 2]], 7, {"a": "b"}, [None]])
async def test_a_prompt_that_is_no_text_has_none(mode: TokenMode, told: object) -> None:
    assert await refused(mode, "completions", json.dumps({"prompt": told}).encode()) == "prompt"


async def test_without_a_template_a_chat_has_none_and_a_text_has_some(pool: Pool) -> None:
    mode = TokenMode("m", ours("bytes"), None, pool)
    assert await refused(mode, "chat", chat("x")) == "no_template"
    assert await ids(mode, "completions", b'{"prompt": "x"}') == whole(made("bytes")[1], "x")


# -- the pool -------------------------------------------------------------------------------------------------------


class Work:
    """Something slow: threads that do it wait until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.done = 0

    def __call__(self) -> bytes:
        self.begun.release()
        assert self.go.wait(60)
        self.done += 1
        return b"ids!"

    async def began(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: self.begun.acquire(timeout=60))


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.go.set()


def later(pool: Pool, key: bytes, work: Callable[[], bytes]) -> asyncio.Future[bytes]:
    found = pool.start(key, INLINE + 1, work)
    assert isinstance(found, asyncio.Future)
    return found


@pytest.mark.parametrize("filler", ["", BULK])
async def test_a_failed_body_is_tried_again_only_after_a_while(pool: Pool, clock: list[float], filler: str) -> None:
    tries = []

    def fail() -> bytes:
        tries.append(clock[0])
        raise Unrendered("prompt")

    async def attempt(key: bytes) -> str:
        try:
            found = pool.start(key, len(filler) + 1, fail)
            await ids_of(found) if isinstance(found, asyncio.Future) else None
        except Unrendered as error:
            return error.reason
        return ""

    begun = clock[0]
    assert [await attempt(b"one") for _ in range(3)] == ["prompt"] * 3
    assert await attempt(b"other") == "prompt"
    assert tries == [begun] * 2
    clock[0] = begun + FAILED_FOR - 0.001
    assert await attempt(b"one") == "prompt"
    assert len(tries) == 2
    clock[0] = begun + FAILED_FOR
    assert [await attempt(b"one") for _ in range(2)] == ["prompt"] * 2
    assert tries == [begun, begun, clock[0]]


async def test_a_body_that_failed_for_a_while_is_prepared_as_ever(pool: Pool, clock: list[float]) -> None:
    def fail() -> bytes:
        raise Unrendered("template")

    with pytest.raises(Unrendered):
        pool.start(b"key", 1, fail)
    clock[0] += FAILED_FOR
    assert [pool.start(b"key", 1, lambda: b"ids!") for _ in range(2)] == [b"ids!"] * 2


async def test_failures_that_are_remembered_are_bounded(pool: Pool) -> None:
    tries = []

    def fail() -> bytes:
        tries.append(1)
        raise Unrendered("prompt")

    for number in range(2 * FAILED):
        with pytest.raises(Unrendered):
            pool.start(b"%d" % number, 1, fail)
    for number in range(FAILED, 2 * FAILED):
        with pytest.raises(Unrendered):
            pool.start(b"%d" % number, 1, fail)
    assert len(tries) == 2 * FAILED
    with pytest.raises(Unrendered):
        pool.start(b"0", 1, fail)
    assert len(tries) == 2 * FAILED + 1


async def test_equal_bodies_of_one_model_are_prepared_once(pool: Pool, work: Work) -> None:
    block = [later(pool, b"block%d" % at, work) for at in range(preparing.THREADS)]
    mode = TokenMode("m", ours("bytes"), Template(PLAIN), pool)
    other = TokenMode("other", ours("bytes"), Template("{{ messages|length }}" + BULK), pool)
    flights = [mode.start("chat", chat(BULK)) for _ in range(5)]
    assert all(flight is flights[0] for flight in flights)
    elsewhere, unlike = other.start("chat", chat(BULK)), mode.start("chat", chat(BULK, user="x"))
    assert len({id(each) for each in (flights[0], elsewhere, unlike)}) == 3
    assert pool.running == len(block) + 3
    work.go.set()
    for flight in (flights[0], elsewhere, unlike, *block):
        assert isinstance(flight, asyncio.Future)
        await ids_of(flight)
    assert flights[0].result() == unlike.result() != elsewhere.result()
    await asyncio.sleep(0)
    assert pool.running == 0


async def test_one_of_those_who_wait_may_leave(pool: Pool, work: Work) -> None:
    flight = later(pool, b"key", work)
    stays, leaves = [asyncio.ensure_future(ids_of(later(pool, b"key", work))) for _ in range(2)]
    await work.began()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert not flight.done()
    work.go.set()
    assert await stays == b"ids!"
    assert work.done == 1


async def test_a_full_pool_takes_no_more_but_shares_what_it_has(pool: Pool, work: Work) -> None:
    flights = [later(pool, b"%d" % number, work) for number in range(PENDING)]
    for _ in range(2):
        with pytest.raises(Unrendered) as caught:
            pool.start(b"another", INLINE + 1, work)
        assert caught.value.reason == "saturated"
    assert later(pool, b"7", work) is flights[7]
    # What is small is done at once all the same.
    assert pool.start(b"small", INLINE, lambda: b"ids!") == b"ids!"
    work.go.set()
    assert await asyncio.gather(*flights) == [b"ids!"] * PENDING
    # To have been turned away is no failure of the body.
    assert await ids_of(later(pool, b"another", work)) == b"ids!"
    assert work.done == PENDING + 1


async def test_who_waits_too_long_goes_on_without(pool: Pool, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = later(pool, b"key", work)
    await work.began()
    monkeypatch.setattr(preparing, "PATIENCE", 0.01)
    for _ in range(2):
        with pytest.raises(Unrendered) as caught:
            await ids_of(later(pool, b"key", work))
        assert caught.value.reason == "late"
    monkeypatch.undo()
    assert not flight.done()
    work.go.set()
    assert await ids_of(later(pool, b"key", work)) == b"ids!"
    assert work.done == 1


async def test_a_closed_pool_leaves_no_threads(clock: list[float], work: Work) -> None:
    before = set(threading.enumerate())

    def ours() -> list[threading.Thread]:
        return [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("tokens")]

    pool = Pool(lambda: clock[0])
    flights = [later(pool, b"%d" % number, work) for number in range(preparing.THREADS + 3)]
    for _ in range(preparing.THREADS):
        await work.began()
    assert len(ours()) == preparing.THREADS
    pool.close()
    # What waits is given up; what is under way ends by itself.
    await asyncio.wait(flights[preparing.THREADS :], timeout=60)
    assert [flight.done() for flight in flights] == [False] * preparing.THREADS + [True] * 3
    work.go.set()
    assert await asyncio.gather(*flights[: preparing.THREADS]) == [b"ids!"] * preparing.THREADS
    for thread in ours():
        await asyncio.to_thread(thread.join, 60)
    assert not ours()
    assert work.done == preparing.THREADS


async def test_a_defect_reaches_all_who_wait_and_is_not_taken_for_a_failed_body(pool: Pool) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError

    for _ in range(2):
        flight = later(pool, b"key", broken)
        with pytest.raises(ZeroDivisionError):
            await ids_of(flight)
    assert await ids_of(later(pool, b"key", lambda: b"ids!")) == b"ids!"
