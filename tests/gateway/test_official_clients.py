"""The official clients of OpenAI and Anthropic, unmodified, through the gateway to simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.config import Config, ModelConfig, Secret, TenantConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import admin, settled, until

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}

OpenAIMaker = Callable[..., openai.AsyncOpenAI]
AnthropicMaker = Callable[..., anthropic.AsyncAnthropic]


@pytest.fixture
async def openai_at() -> AsyncIterator[OpenAIMaker]:
    made: list[openai.AsyncOpenAI] = []

    def make(running: Running, **options: Any) -> openai.AsyncOpenAI:
        options.setdefault("max_retries", 0)
        options.setdefault("api_key", "unused")
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", **options)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def anthropic_at() -> AsyncIterator[AnthropicMaker]:
    made: list[anthropic.AsyncAnthropic] = []

    def make(running: Running, **options: Any) -> anthropic.AsyncAnthropic:
        options.setdefault("max_retries", 0)
        options.setdefault("api_key", "unused")
        client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", **options)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


async def drained(stream: Any) -> int:
    """How many events came."""
    return len([event async for event in stream])


# -- OpenAI -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_chat_whole_and_streamed(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, dialect: str
) -> None:
    client = openai_at(await gateway(await engine(dialect)))
    whole = await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=12, seed=1)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    text, usage = "", None
    stream = await client.chat.completions.create(
        model="sim", messages=MESSAGES, max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True}
    )
    async for part in stream:
        usage = part.usage or usage
        text += part.choices[0].delta.content or "" if part.choices else ""
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_chat_with_tools(gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker) -> None:
    client = openai_at(await gateway(await engine()))
    whole = await client.chat.completions.create(
        model="sim", messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    turn: list[Any] = [
        *MESSAGES,
        whole.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    arguments, names = "", []
    stream = await client.chat.completions.create(
        model="sim", messages=turn, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True
    )
    async for part in stream:
        for delta in part.choices[0].delta.tool_calls or [] if part.choices else []:
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
    assert names == ["get_weather"]
    assert arguments.startswith("{")


async def test_completions_embeddings_and_models(gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker) -> None:
    def aliased(config: Config) -> None:
        config.models = {"sim": ModelConfig(aliases=["default"])}

    client = openai_at(await gateway(await engine(), change=aliased))
    completion = await client.completions.create(model="default", prompt="once", max_tokens=5)
    assert completion.choices[0].text
    tokens = await client.completions.create(model="sim", prompt=[1, 2, 3], max_tokens=5)
    assert tokens.choices[0].text
    several = await client.completions.create(model="sim", prompt=["a", "b"], max_tokens=3)
    assert len(several.choices) == 2
    vectors = await client.embeddings.create(model="sim", input=["a", "b"])
    assert len(vectors.data) == 2
    assert len(vectors.data[0].embedding) > 0
    listed = [model.id async for model in client.models.list()]
    assert sorted(listed) == ["default", "sim"]


async def test_responses_are_pinned_to_the_engine_that_holds_them(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker
) -> None:
    client = openai_at(await gateway(*[await engine() for _ in range(3)]))
    first = await client.responses.create(model="sim", input="hi", max_output_tokens=8)
    assert first.output_text
    for _ in range(4):
        going_on = await client.responses.create(
            model="sim", input="more", previous_response_id=first.id, max_output_tokens=4
        )
        assert going_on.previous_response_id == first.id
        again = await client.responses.retrieve(first.id)
        assert (again.id, again.output_text) == (first.id, first.output_text)
    streamed, kinds = None, []
    async for event in await client.responses.create(
        model="sim", input="hi", max_output_tokens=8, stream=True, previous_response_id=going_on.id
    ):
        kinds.append(event.type)
        if event.type in ("response.completed", "response.incomplete"):
            streamed = event.response
    assert kinds[0] == "response.created"
    assert streamed is not None
    assert (await client.responses.retrieve(streamed.id)).id == streamed.id
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_unknown")


async def test_a_stored_response_is_unreachable_when_its_engine_is_gone(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker
) -> None:
    engines = [await engine() for _ in range(2)]
    running = await gateway(*engines)
    client = openai_at(running)
    first = await client.responses.create(model="sim", input="hi", max_output_tokens=4)
    holder = next(each for each in engines if each.stats()["requests"])
    await holder.kill()
    with pytest.raises(openai.APIStatusError) as error:
        await client.responses.create(model="sim", input="x", previous_response_id=first.id)
    assert error.value.status_code in (502, 503), "never answered by an engine that lacks the state"
    assert (await client.responses.create(model="sim", input="x", max_output_tokens=4)).output_text


async def test_typed_exceptions_of_openai(gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker) -> None:
    started = await engine(context_length=64)
    running = await gateway(started)
    client = openai_at(running)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.param == "model"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "long " * 200}])
    assert "maximum context length" in long.value.message
    started.faults.add("error500")
    with pytest.raises(openai.InternalServerError) as broken:
        await client.chat.completions.create(model="sim", messages=MESSAGES)
    assert (broken.value.status_code, "EngineCore" in broken.value.message) == (500, True)
    started.faults.add("queue_full")
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model="sim", messages=MESSAGES)
    assert full.value.status_code == 503


async def test_keys_of_openai_and_anthropic(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, anthropic_at: AnthropicMaker
) -> None:
    def keyed(config: Config) -> None:
        config.tenants = [TenantConfig("team", keys=[Secret("right")], models=["sim"])]

    running = await gateway(await engine(), change=keyed)
    reply = await openai_at(running, api_key="right").chat.completions.create(model="sim", messages=MESSAGES)
    assert reply.choices
    message = await anthropic_at(running, api_key="right").messages.create(model="sim", messages=MESSAGES, max_tokens=4)
    assert message.content
    with pytest.raises(openai.AuthenticationError):
        await openai_at(running, api_key="wrong").chat.completions.create(model="sim", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        _ = [model async for model in openai_at(running, api_key="wrong").models.list()]
    with pytest.raises(openai.PermissionDeniedError):
        await openai_at(running, api_key="right").chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await anthropic_at(running, api_key="wrong").messages.create(model="sim", messages=MESSAGES, max_tokens=4)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_clients_retry_by_themselves_and_find_the_engine_well_again(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, anthropic_at: AnthropicMaker
) -> None:
    started = await engine()
    running = await gateway(started)
    started.faults.add("error500")
    reply = await openai_at(running, max_retries=2).chat.completions.create(model="sim", messages=MESSAGES)
    assert reply.choices
    started.faults.add("queue_full")
    message = await anthropic_at(running, max_retries=3).messages.create(model="sim", messages=MESSAGES, max_tokens=4)
    assert message.content


async def test_a_stream_that_breaks_is_a_typed_error(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, anthropic_at: AnthropicMaker
) -> None:
    started = await engine()
    running = await gateway(started)
    started.faults.add("reset", after_events=4)
    stream = await openai_at(running).chat.completions.create(
        model="sim", messages=MESSAGES, stream=True, max_tokens=50, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError) as broken:
        await drained(stream)
    assert "before its answer was complete" in broken.value.message
    started.faults.add("reset", after_events=4)
    events = await anthropic_at(running).messages.create(
        model="sim", messages=MESSAGES, stream=True, max_tokens=50, extra_body={"ignore_eos": True}
    )
    with pytest.raises(anthropic.APIStatusError) as failed:
        await drained(events)
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]


async def test_a_client_s_own_timeout_aborts_the_engine(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, anthropic_at: AnthropicMaker
) -> None:
    started = await engine(time_scale=20.0)
    running = await gateway(started)
    with pytest.raises(openai.APITimeoutError):
        await openai_at(running, timeout=0.3).chat.completions.create(model="sim", messages=MESSAGES)
    with pytest.raises(anthropic.APITimeoutError):
        await anthropic_at(running, timeout=0.3).messages.create(model="sim", messages=MESSAGES, max_tokens=500)
    await until(lambda: started.stats()["aborts"] == 2)
    await settled(running)


async def test_cancelling_a_stream_aborts_the_engine(
    gateway: Begin, engine: StartEngine, openai_at: OpenAIMaker, anthropic_at: AnthropicMaker
) -> None:
    started = await engine(time_scale=1.0)
    running = await gateway(started)
    endless: dict[str, Any] = {"model": "sim", "messages": MESSAGES, "max_tokens": 20_000, "stream": True}
    starts: list[Awaitable[Any]] = [
        openai_at(running).chat.completions.create(**endless, extra_body={"ignore_eos": True}),
        anthropic_at(running).messages.create(**endless, extra_body={"ignore_eos": True}),
    ]
    for start in starts:
        stream = await start
        got = 0
        async for _ in stream:
            got += 1
            if got == 3:
                break
        await stream.close()
    waiting = asyncio.ensure_future(openai_at(running).chat.completions.create(**{**endless, "stream": False}))
    await until(lambda: started.stats()["running"] >= 1)
    waiting.cancel()
    await until(lambda: started.stats()["running"] == 0)
    assert started.stats()["kv_blocks_leaked"] == 0
    await settled(running)
    assert "warmroute_defects 0" in await admin(running, "/metrics")


# -- Anthropic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_messages_whole_streamed_and_counted(
    gateway: Begin, engine: StartEngine, anthropic_at: AnthropicMaker, dialect: str
) -> None:
    client = anthropic_at(await gateway(await engine(dialect)))
    whole = await client.messages.create(model="sim", messages=MESSAGES, max_tokens=12, system="be brief")
    assert whole.content[0].type == "text"
    async with client.messages.stream(model="sim", messages=MESSAGES, max_tokens=12, system="be brief") as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = await client.messages.count_tokens(model="sim", messages=MESSAGES)
    assert counted.input_tokens > 0


async def test_messages_with_tools(gateway: Begin, engine: StartEngine, anthropic_at: AnthropicMaker) -> None:
    client = anthropic_at(await gateway(await engine()))
    tools: Any = [{"name": "get_weather", "description": "weather", "input_schema": PARAMETERS}]
    whole = await client.messages.create(
        model="sim", messages=MESSAGES, max_tokens=200, tools=tools, tool_choice={"type": "any"}
    )
    assert whole.stop_reason == "tool_use"
    use = next(block for block in whole.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turn: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = await client.messages.create(model="sim", messages=turn, max_tokens=20, tools=tools)
    assert after.content


async def test_typed_exceptions_of_anthropic(gateway: Begin, engine: StartEngine, anthropic_at: AnthropicMaker) -> None:
    started = await engine(context_length=64)
    client = anthropic_at(await gateway(started))
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="nobody", messages=MESSAGES, max_tokens=4)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model="sim", messages=[{"role": "user", "content": "long " * 200}], max_tokens=4)
    started.faults.add("queue_full")
    with pytest.raises(anthropic.APIStatusError) as full:
        await client.messages.create(model="sim", messages=MESSAGES, max_tokens=4)
    assert full.value.status_code == 503
    assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_the_synchronous_shape_of_the_wire(gateway: Begin, engine: StartEngine) -> None:
    """httpx itself, with keep-alive and HTTP/1.1, decodes what the gateway frames."""
    running = await gateway(await engine())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}") as http:
        for _ in range(3):
            answer = await http.get("/v1/models")
            assert answer.json()["data"][0]["id"] == "sim"
            body = {"model": "sim", "messages": MESSAGES, "stream": True, "max_tokens": 5}
            async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = [line async for line in stream.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
    assert len(running.gateway.server.connections) <= 1
