"""Agents: the official clients, and OpenAI's agent framework, run sessions of several turns with tools through a gateway before
several engines, and find as much in the engines' caches as could be there.

The ceiling is what one engine alone finds when it is asked the same: each session by itself, with an empty cache before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    StopAtTools,
    function_tool,
)
from agents.models.interface import Model
from agents.result import RunResultBase

from gateway.run import Running
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import settled

ENGINES, SESSIONS, TURNS = 4, 8, 4
POINTS = 0.02
"""By how much the hit rate may stay below the ceiling."""
SYSTEM = "You are a careful agent. You read files, search, and say when you are done. " * 10
WORDS = "the quick brown fox jumps over the lazy dog and writes another line of the file. " * 4


class Spent(NamedTuple):
    """Tokens of one request, as it was answered."""

    prompt: int
    cached: int


Session = Callable[[str, int], Awaitable[list[Spent]]]
"""Runs the session of that number at a base address."""


def rate(spent: list[Spent]) -> float:
    return sum(each.cached for each in spent) / sum(each.prompt for each in spent)


async def compare(
    begin: Begin, start: StartEngine, session: Session, what: str, dialect: str = "vllm", helpers: bool = False
) -> None:
    """All sessions at once through a gateway, then one after the other at an engine alone. ``helpers``: they have sub-agents,
    which are sessions too."""
    engines = [await start(dialect, time_scale=0.0) for _ in range(ENGINES)]
    running = await begin(*engines, policy="cache_aware")
    found = await asyncio.gather(*(session(f"http://127.0.0.1:{running.port}", at) for at in range(SESSIONS)))
    alone = await start(dialect, time_scale=0.0)
    ceiling: list[Spent] = []
    for at in range(SESSIONS):
        assert alone.core.clear_caches()
        before = alone.stats()
        told = await session(alone.url, at)
        after = alone.stats()
        assert sum(each.cached for each in told) == after["cached_tokens"] - before["cached_tokens"]
        assert [each.prompt for each in told] == [each.prompt for each in found[at]], "the same was asked, and answered"
        ceiling += told
    spent = [each for some in found for each in some]
    print(f"{what}: {len(spent)} requests, hit rate {rate(spent):.4f}, ceiling {rate(ceiling):.4f}")
    assert len(spent) >= SESSIONS * TURNS * 2
    assert rate(ceiling) > 0.5, "there was something to be found"
    assert rate(spent) >= rate(ceiling) - POINTS
    lost = [max(0, most.cached - each.cached) for most, each in zip(ceiling, spent, strict=True)]
    # A helper is a session of its own, that may start where there is less to do: then its start is computed once more.
    most_lost = 0.02 * sum(each.cached for each in ceiling) if helpers else 0
    assert sum(lost) <= most_lost, "nothing that its own session had computed was computed again"
    assert sum(engine.stats()["cached_tokens"] for engine in engines) == sum(each.cached for each in spent)
    await spread(running, engines)
    assert len(running.sessions) > SESSIONS if helpers else len(running.sessions) == SESSIONS


async def spread(running: Running, engines: list[Engine]) -> None:
    """No engine was left out, and none has more than its share of homes."""
    await settled(running)
    homes = [target.homes for target in running.fleet.targets.values()]
    assert sum(homes) == len(running.sessions)
    assert max(homes) <= 1.34 * len(running.sessions) / ENGINES
    assert all(engine.stats()["requests"] for engine in engines)


# -- the official clients -----------------------------------------------------------------------------------------------


def tool_body(number: int, turn: int, step: int) -> dict[str, Any]:
    """What the engine is told to answer: a call of a tool, then words."""
    reply: dict[str, Any] = {"content": f"Turn {turn} of {number} is done. " + WORDS}
    if step < 2:
        arguments = {"path": f"part{number}/{turn}/{step}.py"}
        reply = {"content": f"I look at {step}.", "tool_calls": [{"name": "read_file", "arguments": arguments}]}
    return {"sim": {"reply": reply}}


def read_file(path: str) -> str:
    return f"{path}: {WORDS}"


PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
OPENAI_TOOLS: list[Any] = [{"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "read_file", "description": "Reads.", "input_schema": PARAMETERS}]


def openai_chat(streamed: bool) -> Session:
    async def run(base: str, number: int) -> list[Spent]:
        spent: list[Spent] = []
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="unused", max_retries=0) as client:
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"Session {number}, turn {turn}: go on."})
                for step in range(3):
                    asked: dict[str, Any] = {
                        "model": "sim",
                        "messages": messages,
                        "tools": OPENAI_TOOLS,
                        "max_tokens": 300,
                        "extra_body": tool_body(number, turn, step),
                    }
                    message, usage = await (_streamed if streamed else _whole)(client, asked)
                    spent.append(Spent(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
                    messages.append(message)
                    for call in message.get("tool_calls") or []:
                        output = read_file(**json.loads(call["function"]["arguments"]))
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        return spent

    return run


async def _whole(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    answer = await client.chat.completions.create(**asked)
    return answer.choices[0].message.model_dump(exclude_none=True), answer.usage


async def _streamed(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    asked["stream_options"] = {"include_usage": True}
    async with client.chat.completions.stream(**asked) as stream:
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    told: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in message.tool_calls
        ]
    return told, answer.usage


async def anthropic_messages(base: str, number: int) -> list[Spent]:
    spent: list[Spent] = []
    messages: list[Any] = []
    async with anthropic.AsyncAnthropic(base_url=base, api_key="unused", max_retries=0) as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Session {number}, turn {turn}: go on."})
            for step in range(3):
                async with client.messages.stream(
                    model="sim",
                    system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
                    messages=messages,
                    tools=ANTHROPIC_TOOLS,
                    max_tokens=300,
                    extra_body=tool_body(number, turn, step),
                ) as stream:
                    answer = await stream.get_final_message()
                usage = answer.usage
                cached = usage.cache_read_input_tokens or 0
                spent.append(Spent(usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached))
                messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
                uses = [block for block in answer.content if block.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": read_file(str(use.input["path"]))}
                    for use in uses
                ]
                if results:
                    messages.append({"role": "user", "content": results})
    return spent


CLIENTS: dict[str, Session] = {
    "openai": openai_chat(False),
    "openai_streamed": openai_chat(True),
    "anthropic_streamed": anthropic_messages,
}


@pytest.mark.parametrize(
    ("client", "dialect"),
    [
        ("openai", "vllm"),
        ("openai_streamed", "sglang"),
        ("anthropic_streamed", "vllm"),
        ("anthropic_streamed", "sglang"),
    ],
)
async def test_official_clients_find_their_sessions_in_the_cache(
    gateway: Begin, engine: StartEngine, client: str, dialect: str
) -> None:
    await compare(gateway, engine, CLIENTS[client], f"{client} at {dialect}", dialect)


# -- the agent framework ------------------------------------------------------------------------------------------------


@function_tool
def look(path: str) -> str:
    """Read a file.

    Args:
        path: which one.
    """
    return read_file(path)


@function_tool
def search(words: str, deep: bool) -> str:
    """Search the repository."""
    return f"found {words}: " + WORDS * (2 if deep else 1)


@function_tool
def done(summary: str) -> str:
    """Say that the work is done."""
    return f"noted: {summary}"


def framework(
    make: Callable[[openai.AsyncOpenAI], Model], *, chained: bool = False, streamed: bool = False, helped: bool = False
) -> Session:
    """An agent that calls tools until it says that it is done, several times over. ``chained``: the responses are stored, and
    only what is new is sent. ``helped``: one of its tools is another agent."""

    async def run(base: str, number: int) -> list[Spent]:
        spent: list[Spent] = []
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="unused", max_retries=0) as client:
            helping: list[Spent] = []
            agent = _agent(make(client), "worker", SYSTEM, [look, search, done])
            if helped:
                agent.tools.append(_helper(make(client), helping))
            history: list[Any] = []
            previous: str | None = None
            for turn in range(TURNS):
                asked = {"role": "user", "content": f"Session {number}, turn {turn}: {WORDS[:60]}"}
                given: list[Any] = [asked] if chained else [*history, asked]
                options: dict[str, Any] = {
                    "max_turns": 60,
                    "run_config": RunConfig(tracing_disabled=True),
                    "previous_response_id": previous,
                    "auto_previous_response_id": chained,
                }
                result: RunResultBase
                if streamed:
                    result = streaming = Runner.run_streamed(agent, given, **options)
                    async for _ in streaming.stream_events():
                        pass
                else:
                    result = await Runner.run(agent, given, **options)
                assert str(result.final_output).startswith("noted: ")
                history = result.to_input_list()
                previous = result.last_response_id if chained else None
                spent += _spent(result)
        return spent + helping

    return run


def _agent(model: Model, name: str, instructions: str, tools: list[Any]) -> Agent[Any]:
    return Agent(
        name=name,
        instructions=instructions,
        model=model,
        tools=tools,
        model_settings=ModelSettings(tool_choice="required", max_tokens=300, include_usage=True),
        tool_use_behavior=StopAtTools(stop_at_tool_names=["done"]),
        reset_tool_choice=False,
    )


def _helper(model: Model, spent: list[Spent]) -> Any:
    """A tool that is an agent of its own."""

    async def told(result: RunResult | RunResultStreaming) -> str:
        spent.extend(_spent(result))
        return str(result.final_output)

    agent = _agent(model, "helper", "You help with one small thing. " * 20, [look, done])
    return agent.as_tool(
        "ask_helper",
        "Has a helper do a part of it.",
        custom_output_extractor=told,
        run_config=RunConfig(tracing_disabled=True),
        max_turns=60,
    )


def _spent(result: RunResultBase) -> list[Spent]:
    usages = [response.usage for response in result.raw_responses]
    return [Spent(usage.input_tokens, usage.input_tokens_details.cached_tokens) for usage in usages]


FRAMEWORK: dict[str, Session] = {
    "chat_completions": framework(lambda client: OpenAIChatCompletionsModel("sim", client)),
    "chat_completions_streamed": framework(lambda client: OpenAIChatCompletionsModel("sim", client), streamed=True),
    "chat_completions_with_helpers": framework(lambda client: OpenAIChatCompletionsModel("sim", client), helped=True),
    "responses": framework(lambda client: OpenAIResponsesModel("sim", client)),
    "responses_chained": framework(lambda client: OpenAIResponsesModel("sim", client), chained=True),
    "responses_streamed": framework(lambda client: OpenAIResponsesModel("sim", client), chained=True, streamed=True),
}


@pytest.mark.parametrize("model", list(FRAMEWORK))
async def test_agents_of_the_framework_find_their_sessions_in_the_cache(
    gateway: Begin, engine: StartEngine, model: str
) -> None:
    await compare(
        gateway, engine, FRAMEWORK[model], f"openai-agents over {model}", helpers=model.endswith("with_helpers")
    )
