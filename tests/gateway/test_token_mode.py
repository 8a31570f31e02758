"""Models with a tokenizer and a template: prompts are the very tokens of the engine, and whatever cannot be told is served
by text all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from tokenizers import AddedToken, Tokenizer as Fast, decoders, models, pre_tokenizers, trainers

from gateway import preparing
from gateway.config import Config, ModelConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import ok
from tests.gateway.talk import CHAT, Raw, Response, admin, chat, once, request, settled, until
from tests.qwen import Files

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'strange' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}{% for call in message.tool_calls %}
        {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if messages[0].content.startswith('SLOW') %}
    {%- for a in range(600) %}{% for b in range(3000) %}{% endfor %}{% endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LESSONS = ["The quick brown fox jumps over the lazy dog, and it's 3.14 metres away.\n\n", '{"name": "web_search"}']


class Language(NamedTuple):
    """Files of a small model."""

    tokenizer: str
    template: str


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    folder = tmp_path_factory.mktemp("model")
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        LESSONS, trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    )
    fast.add_tokens([AddedToken(each, normalized=False) for each in ("<|im_start|>", "<|im_end|>", "<tool_call>")])
    fast.save(str(folder / "tokenizer.json"))
    Path(folder, "template.jinja").write_text(TEMPLATE)
    return Language(str(folder / "tokenizer.json"), str(folder / "template.jinja"))


def with_tokens(language: Language | Files, **more: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config.models["sim"] = ModelConfig(tokenizer=language.tokenizer, template=language.template, **more)

    return change


async def begin(gateway: Begin, *workers: Any, language: Language | Files, **more: Any) -> Running:
    return await gateway(*workers, policy="cache_aware", change=with_tokens(language, **more))


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}], max_tokens=2, **fields)


def filled(text: str, **fields: Any) -> dict[str, Any]:
    """Too large to be read at once."""
    return saying(text + " lazy dog" * 300, **fields)


async def fallbacks(running: Running) -> dict[str, int]:
    """Requests that were routed by text, by why."""
    found: dict[str, int] = {}
    for line in (await admin(running, "/metrics")).splitlines():
        if line.startswith("warmroute_token_fallbacks_total{"):
            assert 'model="sim"' in line
            found[line.partition('reason="')[2].partition('"')[0]] = int(float(line.rsplit(" ", 1)[1]))
    return found


async def dry_run(running: Running, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    url = f"http://127.0.0.1:{running.admin.port}/route?path={path}"
    async with aiohttp.ClientSession() as http, http.post(url, data=json.dumps(body)) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


def believed(answer: Response) -> int:
    return int(answer.one("x-warmroute-predicted-cached-tokens"))


def found(answer: Response) -> int:
    return (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "web_search",
            "description": "Search <b>",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "web_search", "arguments": '{"q": "fox & dog"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "short": saying("hi"),
    "long": filled("The quick"),
    "other alphabets": saying("你好，世界 🇨🇳 e\u0301 naïve \U0001f600" * 20),
    "escapes": saying('"\\\u0000\u001f\t\r\n</script>'),
    "special tokens in the text": saying("<|im_start|>system\nno<|im_end|> <|im_start|"),
    "system": chat(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], max_tokens=1
    ),
    "parts": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}],
        max_tokens=1,
    ),
    "tools": saying("search", tools=TOOLS),
    "calls": chat(
        messages=[
            {"role": "user", "content": "search"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "found it"},
        ],
        tools=TOOLS,
        max_tokens=1,
    ),
    "empty": saying(""),
    "spaces": saying("  \n\n  x \t "),
}


@pytest.mark.parametrize("name", BODIES)
async def test_prompts_are_counted_to_the_token(
    gateway: Begin, engine: StartEngine, language: Language, name: str
) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language)
    body = BODIES[name]
    dry = await dry_run(running, body)
    first = await once(running.port, request(body))
    assert first.status == 200, first.body
    assert dry["prompt_tokens"] == first.json()["usage"]["prompt_tokens"]
    again = await once(running.port, request(body))
    assert believed(again) == found(again) == (first.json()["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert await fallbacks(running) == {}


@pytest.mark.parametrize("name", [name for name in BODIES if name not in ("parts",)])
async def test_prompts_of_a_real_model_are_counted_to_the_token(
    gateway: Begin, engine: StartEngine, qwen: Files, name: str
) -> None:
    one = await engine(events=True, tokenizer=qwen.tokenizer, template=qwen.template, time_scale=0)
    running = await begin(gateway, one, language=qwen)
    body = BODIES[name]
    dry = await dry_run(running, body)
    answer = await once(running.port, request(body))
    assert answer.status == 200, answer.body
    assert dry["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    again = await once(running.port, request(body))
    assert believed(again) == found(again)
    assert await fallbacks(running) == {}


async def test_a_text_is_counted_to_the_token_too(gateway: Begin, engine: StartEngine, language: Language) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language)
    for prompt in ("a fox ", ["one text alone " * 40], "x" * 5000):
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
        dry = await dry_run(running, body, "/v1/completions")
        answer = await once(running.port, request(body, path="/v1/completions"))
        assert dry["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert await fallbacks(running) == {}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_turns_of_a_chat_are_predicted_to_the_token(
    gateway: Begin, engine: StartEngine, language: Language, dialect: str
) -> None:
    engines = [
        await engine(
            dialect, events=True, hash_seed=at, tokenizer=language.tokenizer, template=language.template, time_scale=0
        )
        for at in range(2)
    ]
    running = await begin(gateway, *engines, language=language)
    talks: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": f"{at} fox " * 30}]
        for at in range(4)
    ]
    async with await Raw.connect(running.port) as client:
        for turn in range(4):
            for at, messages in enumerate(talks):
                body = chat(messages=messages, max_tokens=30)
                answer = await client.ask(request(body, f"X-Session-Id: s{at}"))
                told = answer.json()
                await until(lambda: all(heard(running, each) for each in engines))
                assert believed(answer) == found(answer), (turn, at)
                said = told["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"go on {turn}"}]
    assert await fallbacks(running) == {}


def heard(running: Running, engine: Any) -> bool:
    if engine.core.busy:
        return False
    worker = next(worker for worker in running.fleet.workers.values() if worker.port == engine.port)
    (row,) = engine.events.listing()
    listener = running.subscriptions.listeners[worker.targets[0].id]
    return bool(listener.feed.last + 1 >= row["next_seq"])


# -- what cannot be told ----------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
UNTOLD: dict[str, tuple[str, dict[str, Any]]] = {
    "an image": ("media", chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}])),
    "a sound": (
        "media",
        chat(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]),
    ),
    "what the template refuses": ("template", chat(messages=[{"role": "strange", "content": "x"}])),
    "a template of its own": ("parameter", saying("x", chat_template="{{ messages }}")),
    "another end": ("parameter", saying("x", add_generation_prompt=False)),
    "going on": ("parameter", saying("x", continue_final_message=True)),
    "no messages": ("messages", chat(messages=[])),
    "messages of numbers": ("messages", chat(messages=[1, 2])),
    "messages that are none": ("messages", chat(messages="x")),
    "tools of numbers": ("tools", saying("x", tools=[7])),
    "odd arguments of the template": ("parameter", saying("x", chat_template_kwargs={"messages": 7})),
}


@pytest.mark.parametrize("large", [False, True], ids=["at once", "in the pool"])
@pytest.mark.parametrize("name", UNTOLD)
async def test_what_cannot_be_told_goes_by_text(
    gateway: Begin, scripted: StartScripted, language: Language, name: str, large: bool
) -> None:
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    reason, body = UNTOLD[name]
    if large:
        body = {**body, "user": "x" * 5000}
    sent = request(body)
    for count in (1, 2):
        answer = await once(running.port, sent)
        assert answer.status == 200
        assert await fallbacks(running) == {reason: count}
    assert worker.seen[-1].body == sent.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x " * 2000}], "max_tokens": 2}),
        ("/v1/responses", {"input": "x " * 2000, "max_output_tokens": 2}),
    ],
)
async def test_dialects_whose_prompts_engines_make_otherwise_go_by_text(
    gateway: Begin, engine: StartEngine, language: Language, path: str, body: dict[str, Any]
) -> None:
    one = await engine(tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language)
    for count in (1, 2):
        answer = await once(running.port, request({"model": "sim", **body}, path=path))
        assert answer.status == 200, answer.body
        assert await fallbacks(running) == {"dialect": count}
    assert believed(answer) > 500, "by what was routed"


async def test_bodies_that_are_no_json_are_answered_as_ever(
    gateway: Begin, engine: StartEngine, language: Language
) -> None:
    one = await engine(time_scale=0)
    running = await begin(gateway, one, language=language)
    for body in (b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model":"sim","messages":' + b"[" * 3000):
        answer = await once(running.port, request(body))
        assert 400 <= answer.status < 500, body
    # A text where ids would be, and ids where a text would be.
    for prompt in ([], [""], ["a", "b"], [[1, 2]], 7, None, [1.5], [-1]):
        answer = await once(running.port, request({"model": "sim", "prompt": prompt}, path="/v1/completions"))
        assert answer.status in (200, 400)
    assert (await once(running.port, request(saying("fine")))).status == 200


async def test_ids_that_the_client_sends_are_taken_as_they_are(
    gateway: Begin, engine: StartEngine, language: Language
) -> None:
    one = await engine(events=True, time_scale=0)
    running = await begin(gateway, one, language=language)
    body = {"model": "sim", "prompt": list(range(100)), "max_tokens": 1}
    for _ in range(2):
        answer = await once(running.port, request(body, path="/v1/completions"))
    assert believed(answer) == found(answer) == 96
    assert await fallbacks(running) == {}


async def test_a_policy_that_needs_no_prefix_makes_no_ids(
    gateway: Begin, scripted: StartScripted, language: Language
) -> None:
    worker = await scripted()
    running = await gateway(worker, policy="least_load", change=with_tokens(language))
    for body in (saying("x"), filled("x"), UNTOLD["an image"][1]):
        assert (await once(running.port, request(body))).status == 200
    assert await fallbacks(running) == {}
    assert running.pool is not None
    assert running.pool.running == 0


# -- while prompts are being made -------------------------------------------------------------------------------------


async def test_clients_that_leave_meanwhile_leave_nothing_behind(
    gateway: Begin, scripted: StartScripted, language: Language
) -> None:
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    clients = [await Raw.connect(running.port) for _ in range(8)]
    for at, client in enumerate(clients):
        await client.send(request(filled(f"SLOW {at // 2}")))
    await until(lambda: len(running.gateway.preparing) == 8)
    for client in clients[::2]:
        client.vanish()
    await until(lambda: len(running.gateway.preparing) <= 4)
    for client in clients[1::2]:
        assert (await client.response()).status == 200
        client.vanish()
    assert len(worker.seen) == 4
    await settled(running)
    assert not running.gateway.preparing
    assert running.pool is not None
    await until(lambda: running.pool is not None and running.pool.running == 0)
    assert (await once(running.port, request(filled("and on it goes")))).status == 200


async def test_more_than_the_pool_takes_goes_by_text(
    gateway: Begin, scripted: StartScripted, language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PENDING", 3)
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    clients = [await Raw.connect(running.port) for _ in range(6)]
    for at, client in enumerate(clients):
        await client.send(request(filled(f"SLOW {at}")))
    for client in clients:
        assert (await client.response()).status == 200
        client.vanish()
    assert await fallbacks(running) == {"saturated": 3}


async def test_what_takes_too_long_goes_by_text(
    gateway: Begin, scripted: StartScripted, language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PATIENCE", 0.05)
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    # Three on two threads.
    answers = await asyncio.gather(*[once(running.port, request(filled(f"SLOW {at}"))) for at in range(3)])
    assert [answer.status for answer in answers] == [200] * 3
    assert (await fallbacks(running)).get("late", 0) >= 1


async def test_equal_bodies_are_made_once(gateway: Begin, scripted: StartScripted, language: Language) -> None:
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    clients = [await Raw.connect(running.port) for _ in range(10)]
    for client in clients:
        await client.send(request(filled("SLOW all the same")))
    await until(lambda: len(running.gateway.preparing) == 10)
    assert running.pool is not None
    assert running.pool.running == 1
    for client in clients:
        assert (await client.response()).status == 200
        client.vanish()


async def test_pipelined_requests_keep_their_order(gateway: Begin, scripted: StartScripted, language: Language) -> None:
    async def echo(seen: Any) -> None:
        body = json.loads(seen.body)
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        await seen.write(ok(json.dumps({"said": text[:8]}).encode()))

    worker = await scripted(echo)
    running = await begin(gateway, worker, language=language)
    bodies = [
        filled("SLOW one"),
        saying("two     "),
        UNTOLD["an image"][1] | {"messages": [{"role": "user", "content": "three   "}], "chat_template": "x"},
        filled("four    "),
        filled("SLOW fiv"),
        saying("six     "),
    ]
    async with await Raw.connect(running.port) as client:
        await client.send(b"".join(request(body) for body in bodies))
        said = [(await client.response()).json()["said"] for _ in bodies]
    assert said == ["SLOW one", "two     ", "three   ", "four    ", "SLOW fiv", "six     "]


async def test_a_request_that_comes_in_pieces_is_made_whole(
    gateway: Begin, engine: StartEngine, language: Language
) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language)
    data = request(filled("in pieces"))
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            for at in range(0, len(data), 997):
                await client.send(data[at : at + 997])
                await asyncio.sleep(0)
            answer = await client.response()
            assert answer.status == 200
        assert believed(answer) == found(answer) > 100


async def test_prompts_that_are_being_made_at_shutdown_are_served_if_there_is_time(
    gateway: Begin, scripted: StartScripted, language: Language
) -> None:
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    running.config.drain_limit = 10.0
    clients = [await Raw.connect(running.port) for _ in range(2)]
    for at, client in enumerate(clients):
        await client.send(request(filled(f"SLOW {at}")))
    await until(lambda: len(running.gateway.preparing) == 2)
    stopping = asyncio.create_task(running.stop())
    for client in clients:
        assert (await client.response()).status == 200
        client.vanish()
    await stopping
    assert not running.gateway.preparing


async def test_prompts_that_are_being_made_when_time_is_over_are_dropped(
    gateway: Begin, scripted: StartScripted, language: Language
) -> None:
    worker = await scripted()
    running = await begin(gateway, worker, language=language)
    running.config.drain_limit = 0.0
    clients = [await Raw.connect(running.port) for _ in range(6)]
    for at, client in enumerate(clients):
        await client.send(request(filled(f"SLOW {at}")))
    await until(lambda: len(running.gateway.preparing) == 6)
    await running.stop()
    assert not running.gateway.preparing
    for client in clients:
        assert await client.rest() == b""
    assert worker.seen == []


async def test_a_dry_run_sees_what_a_request_would(gateway: Begin, engine: StartEngine, language: Language) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language)
    for body in (saying("at once " * 20), filled("in the pool")):
        assert (await once(running.port, request(body))).status == 200
        await until(lambda: heard(running, one))
        dry = await dry_run(running, body)
        (row,) = dry["candidates"]
        again = await once(running.port, request(body))
        assert sum(row["holding_tokens"].values()) == believed(again) == found(again) > 0
        assert dry["prompt_tokens"] == again.json()["usage"]["prompt_tokens"]
    assert await fallbacks(running) == {}


async def test_engines_may_make_the_ids(gateway: Begin, engine: StartEngine, language: Language) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)

    def change(config: Config) -> None:
        config.models["sim"] = ModelConfig(tokenizer="engine")

    running = await gateway(one, policy="cache_aware", change=change)
    for name in ("short", "long", "tools", "system", "other alphabets"):
        body = BODIES[name]
        dry = await dry_run(running, body)
        first = await once(running.port, request(body))
        assert dry["prompt_tokens"] == first.json()["usage"]["prompt_tokens"], name
        again = await once(running.port, request(body))
        assert believed(again) == found(again)
    assert await fallbacks(running) == {}


async def test_aliases_have_ids_as_well(gateway: Begin, engine: StartEngine, language: Language) -> None:
    one = await engine(events=True, tokenizer=language.tokenizer, template=language.template, time_scale=0)
    running = await begin(gateway, one, language=language, aliases=["other"])
    body = {**saying("by another name " * 20), "model": "other"}
    dry = await dry_run(running, body)
    answer = await once(running.port, request(body))
    assert dry["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    again = await once(running.port, request({**body, "model": "sim"}))
    assert believed(again) == found(again) > 0
