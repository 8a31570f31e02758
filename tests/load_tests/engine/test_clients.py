"""The official clients, against the engine directly."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import LONG, WEATHER, user


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "openai"])
async def test_the_openai_client(start: Start, dialect: str) -> None:
    engine = await start(dialect)
    async with openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "system", "content": LONG}, user("hi")]
        whole = await client.chat.completions.create(model="sim", messages=messages)  # type: ignore[call-overload]
        pieces = []
        usage = None
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="sim", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert usage is not None
        assert usage.prompt_tokens_details.cached_tokens > 0
        called = await client.chat.completions.create(  # type: ignore[call-overload]
            model="sim", messages=messages, tools=[WEATHER], tool_choice="required"
        )
        assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
        completion = await client.completions.create(model="sim", prompt="hello", max_tokens=5)
        assert completion.choices[0].finish_reason == "length"
        vectors = await client.embeddings.create(model="sim", input=["a", "b"])
        assert len(vectors.data) == 2
        assert (await client.models.list()).data[0].id == "sim"
        response = await client.responses.create(model="sim", input="hi")
        async with client.responses.stream(model="sim", input="hi") as events:
            async for _ in events:
                pass
            final = await events.get_final_response()
        assert final.output_text == response.output_text


async def test_the_openai_client_sees_errors_as_it_knows_them(start: Start) -> None:
    engine = await start(context_length=64)
    async with openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": LONG * 9}])
        engine.faults.add("error500")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_the_anthropic_client(start: Start, dialect: str) -> None:
    engine = await start(dialect)
    async with anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0) as client:
        question: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hello"}]
        whole = await client.messages.create(model="sim", max_tokens=300, messages=question, system=LONG)
        async with client.messages.stream(model="sim", max_tokens=300, messages=question, system=LONG) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert whole.content[0].type == "text"
        assert text == whole.content[0].text
        assert final.stop_reason == whole.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.usage.cache_read_input_tokens
        tool: anthropic.types.ToolParam = {"name": "look", "input_schema": {"type": "object", "properties": {
            "where": {"type": "string"}}}}  # fmt: skip
        async with client.messages.stream(
            model="sim", max_tokens=300, messages=question, tools=[tool], tool_choice={"type": "any"}
        ) as stream:
            called = await stream.get_final_message()
        assert called.stop_reason == "tool_use"
        block = called.content[0]
        assert block.type == "tool_use"
        assert set(block.input) == {"where"}
        again = await client.messages.create(
            model="sim",
            max_tokens=300,
            tools=[tool],
            messages=[
                *question,
                {"role": "assistant", "content": called.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "here"}]},
            ],
        )
        assert again.usage.cache_read_input_tokens
        counted = await client.messages.count_tokens(model="sim", messages=question)
        assert counted.input_tokens > 3
        if dialect == "vllm":
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="x", max_tokens=3, messages=question)
