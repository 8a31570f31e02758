"""Sessions of every common client, as that client names them: at home at every turn, and spread evenly.

Each client here is what it really sends: path, headers and body. Its sessions all begin with one system prompt and one set of
tools, grow by an answer and a tool's result a turn, and run beside each other.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families
from xxhash import xxh3_128_hexdigest

from gateway.config import Config
from gateway.run import Running
from gateway.sessions import Session
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, Response, admin, request

CHAT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"
ENGINES, SESSIONS, TURNS = 4, 32, 10
EVEN = 1.3
"""Most sessions at home on one engine, over the mean."""
HICCUPS = 1
"""Turns of 288 that may leave home: where the machine does something else for a while, waiting may cost more than moving."""
SYSTEM = "You are a coding agent. Read before you write, and run the tests. " * 24
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}]
TOOLS_OF = {
    CHAT: CHAT_TOOLS,
    MESSAGES: [{"name": "read_file", "input_schema": PARAMETERS}],
    RESPONSES: [{"type": "function", "name": "read_file", "parameters": PARAMETERS}],
}
KEY = "Authorization: Bearer sk-everybody-has-this-one"
ACCOUNT = "0d5c9a52-4f0c-4d2e-a7a5-1f2e3d4c5b6a"


def uuid(*what: object) -> str:
    """Always the same one for the same thing."""
    return str(UUID(xxh3_128_hexdigest(repr(what).encode())))


@dataclass
class Turn:
    """One request of a client: fields of its head, members of its body, and where its billing line would stand."""

    lines: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    system: str = ""


@dataclass
class Client:
    """``turn`` makes what names session ``s`` at turn ``t``; ``source`` is what the gateway is to recognise it by."""

    name: str
    source: str
    turn: Callable[[str, int], Turn]
    path: str = CHAT
    dialect: str = "vllm"
    stored: bool = False
    """Each turn names the response before it, and sends what is new."""
    echoes: str = ""
    """The gateway's token is sent back: as a header, or as a cookie."""


def heads(*names: str, **fixed: Any) -> Callable[[str, int], Turn]:
    """Those headers have the session's id; ``fixed`` are members of the body."""
    return lambda s, t: Turn([f"{name}: {uuid(s)}" for name in names], dict(fixed))


def said(**members: Any) -> Callable[[str, int], Turn]:
    """Members of the body; ``%s`` in them is the session's id."""

    def fill(value: Any, s: str) -> Any:
        if isinstance(value, dict):
            return {key: fill(inner, s) for key, inner in value.items()}
        return value.replace("%s", s) if isinstance(value, str) else value

    return lambda s, t: Turn([], fill(members, uuid(s)))


def claude(s: str, t: int) -> Turn:
    """It names the session twice, beside its account."""
    user = json.dumps({"device_id": "d" * 64, "account_uuid": ACCOUNT, "session_id": uuid(s)})
    lines = [f"X-Claude-Code-Session-Id: {uuid(s)}", "x-app: cli", "anthropic-version: 2023-06-01"]
    return Turn(lines, {"metadata": {"user_id": user}})


def agents(s: str, t: int) -> Turn:
    """Four sub-agents of each session, one of them the child of another."""
    number = int(s.rsplit("-", 1)[1])
    session, agent = uuid("team", number // 4), number % 4
    lines = [f"x-claude-code-session-id: {session}"]
    if agent:
        lines.append(f"x-claude-code-agent-id: {uuid('agent', agent)}")
    if agent == 3:
        lines.append(f"x-claude-code-parent-agent-id: {uuid('agent', 2)}")
    return Turn(lines)


def old_claude(s: str, t: int) -> Turn:
    return Turn([], {"metadata": {"user_id": f"user_{'ab12' * 16}_account_{ACCOUNT}_session_{uuid(s)}"}})


def new_claude(s: str, t: int) -> Turn:
    return Turn([], {"metadata": claude(s, t).body["metadata"]})


def codex(s: str, t: int) -> Turn:
    """Its headers, and a turn state that is another at every turn."""
    lines = [f"session-id: {uuid(s)}", f"thread-id: {uuid(s)}", f"x-codex-turn-state: {uuid(s, t)}"]
    return Turn(lines, {"prompt_cache_key": uuid(s), "store": False})


def old_codex(s: str, t: int) -> Turn:
    return Turn([f"session_id: {uuid(s)}", f"conversation_id: {uuid(s)}"], {"store": False})


def threads(s: str, t: int) -> Turn:
    """A session with threads of its own, and one helper."""
    number = int(s.rsplit("-", 1)[1])
    session, thread = uuid("codex", number // 4), number % 4
    lines = [f"session-id: {session}", f"thread-id: {uuid('thread', number) if thread in (1, 2) else session}"]
    return Turn([*lines, "x-openai-subagent: review"] if thread == 3 else lines, {"store": False})


def opencode(s: str, t: int) -> Turn:
    """Every second session is the child of the one before."""
    number = int(s.rsplit("-", 1)[1])
    lines = [f"{name}: ses_{uuid(s)}" for name in ("x-session-affinity", "x-session-id", "x-opencode-session")]
    if number % 2:
        lines.append(f"x-parent-session-id: ses_{uuid(s.rsplit('-', 1)[0] + f'-{number - 1}')}")
    return Turn(lines)


def aiperf(s: str, t: int) -> Turn:
    return Turn([f"x-correlation-id: {uuid(s)}", f"x-request-id: {uuid(s, t)}"])


def nameless(s: str, t: int) -> Turn:
    """What differs from request to request, and what never differs."""
    trace = uuid(s, t).replace("-", "")
    return Turn(
        [f"x-request-id: {uuid(s, t)}", f"traceparent: 00-{trace}-{trace[:16]}-01", "x-forwarded-for: 10.0.0.9"]
    )


def constant(s: str, t: int) -> Turn:
    """One key, one user, one account for all of them."""
    body = {"user": "everybody", "safety_identifier": "everybody", "metadata": {"user_id": "everybody"}}
    return Turn([KEY, "x-api-key: sk-everybody-has-this-one", "cookie: session-id=1"], body)


def plain(s: str, t: int) -> Turn:
    return Turn()


CLIENTS = [
    Client("claude_code", "x-claude-code-session-id", claude, MESSAGES),
    Client("claude_code_agents", "x-claude-code-session-id", agents, MESSAGES),
    Client("claude_code_old", "metadata.user_id", old_claude, MESSAGES),
    Client("claude_code_body", "metadata.user_id", new_claude, MESSAGES, dialect="sglang"),
    Client("codex", "session-id", codex, RESPONSES),
    Client("codex_old", "session-id", old_codex, RESPONSES),
    Client("codex_cache_key", "prompt_cache_key", said(prompt_cache_key="%s", store=False), RESPONSES),
    Client("codex_threads", "session-id", threads, RESPONSES),
    Client("opencode", "x-session-id", opencode),
    Client("opencode_affinity", "x-session-affinity", heads("x-session-affinity", "x-opencode-session")),
    Client("cline", "x-task-id", heads("X-Task-ID")),
    Client("open_webui", "x-openwebui-chat-id", heads("X-OpenWebUI-Chat-Id")),
    Client("litellm", "x-litellm-session-id", heads("x-litellm-session-id", "x-litellm-trace-id")),
    Client("litellm_trace", "x-litellm-trace-id", heads("x-litellm-trace-id")),
    Client("litellm_body", "litellm_session_id", said(litellm_session_id="%s")),
    Client("openhands", "metadata.session_id", said(metadata={"session_id": "%s", "tags": ["agent:CodeActAgent"]})),
    Client("benchmarks", "x-session-id", heads("X-Session-ID"), dialect="sglang"),
    Client("aiperf", "x-correlation-id", aiperf),
    Client("sglang_session", "session_id", said(session_id="%s"), dialect="sglang"),
    Client("sglang_rid", "rid", lambda s, t: Turn([], {"rid": f"chain-{uuid(s)}_t{t}_r0"}), dialect="sglang"),
    Client("sglang_generate", "rid", lambda s, t: Turn([], {"rid": f"c{uuid(s)}_t{t}"}), GENERATE, dialect="sglang"),
    Client("smg", "x-smg-routing-key", heads("x-smg-routing-key"), dialect="sglang"),
    Client("grok", "x-grok-conv-id", heads("x-grok-conv-id")),
    Client("fireworks", "x-session-affinity", heads("x-session-affinity", user="team")),
    Client("cache_key", "prompt_cache_key", said(prompt_cache_key="%s")),
    Client("any_agent", "x-*-session-id", heads("x-my-agent-session-id")),
    Client("responses", "previous_response_id", plain, RESPONSES, stored=True),
    Client("conversation", "conversation", said(conversation={"id": "conv_%s"}), RESPONSES),
    Client("nameless_chat", "content", nameless),
    Client("nameless_messages", "content", nameless, MESSAGES),
    Client("nameless_responses", "content", nameless, RESPONSES),
    Client("nameless_sglang", "content", nameless, dialect="sglang"),
    Client("constant_key_and_user", "content", constant),
    Client("constant_key_messages", "content", constant, MESSAGES),
    Client("token_of_responses", "sticky", plain, RESPONSES, stored=True, echoes="header"),
    Client("token", "sticky", constant, echoes="header"),
    Client("cookie", "sticky", plain, echoes="cookie"),
    Client("token_generate", "sticky", plain, GENERATE, dialect="sglang", echoes="header"),
]


def billing(client: Client) -> Client:
    """With the line that Claude Code puts first, another at every request: engines strip it."""

    def turn(s: str, t: int) -> Turn:
        line = f"x-anthropic-billing-header: cc_version=2.1.3.c2f; cc_entrypoint=cli; cch={uuid(s, t)[:5]};"
        return replace(client.turn(s, t), system=line)

    return replace(client, name=f"{client.name}_billing", turn=turn)


CLIENTS += [billing(client) for client in CLIENTS if client.path == MESSAGES]
NAMELESS = next(client for client in CLIENTS if client.name == "nameless_chat")


# -- a session of one client --------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """One session, as its client keeps it."""

    client: Client
    name: str
    history: list[Any] = field(default_factory=list)
    text: str = ""
    previous: str = ""
    token: str = ""
    workers: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def next(self, turn: int) -> bytes:
        """The request of its next turn."""
        path, made = self.client.path, self.client.turn(self.name, turn)
        body: dict[str, Any] = {"model": "sim", **made.body, "stream": False}
        lines = list(made.lines)
        if self.client.echoes == "header" and self.token:
            lines.append(f"x-warmroute-session: {self.token}")
        if self.client.echoes == "cookie" and self.token:
            lines.append(f"cookie: theme=dark; x-warmroute-session={self.token}; lang=en")
        if turn == 0:
            self._user(f"Task {self.name}: make the tests of part {self.name} pass.")
        elif turn % 4 == 3:
            self._user(f"Now step {turn} of {self.name}.")
        else:
            self._result(turn)
        if path == GENERATE:
            self.text = self.text or SYSTEM
            body |= {"text": self.text + str(self.history), "sampling_params": {"max_new_tokens": 4}}
            return request(body, *lines, path=path)
        body["tools"], body["tool_choice"] = TOOLS_OF[path], "none" if path != MESSAGES else {"type": "none"}
        if path == CHAT:
            body |= {"messages": [{"role": "system", "content": SYSTEM}, *self.history], "max_tokens": 4}
        elif path == MESSAGES:
            blocks: list[Any] = [{"type": "text", "text": made.system}] if made.system else []
            blocks.append({"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}})
            body |= {"system": blocks, "messages": self.history, "max_tokens": 4}
        else:
            body |= {"instructions": SYSTEM, "input": self.history, "max_output_tokens": 4}
            if self.previous:
                body["previous_response_id"] = self.previous
        return request(body, *lines, path=path)

    def _user(self, text: str) -> None:
        if self.client.path == MESSAGES:
            self.history.append({"role": "user", "content": [{"type": "text", "text": text}]})
        else:
            self.history.append({"role": "user", "content": text})

    def _result(self, turn: int) -> None:
        """The answer before becomes a call, whose result is told."""
        call, output = f"call_{turn}_{uuid(self.name)[:8]}", f"line {turn} of {self.name}: ok. " * 6
        arguments = json.dumps({"path": f"part{turn}.py"})
        if self.client.path == MESSAGES:
            use = {"type": "tool_use", "id": call, "name": "read_file", "input": {"path": f"part{turn}.py"}}
            self.history[-1]["content"].append(use)
            result = {"type": "tool_result", "tool_use_id": call, "content": output}
            self.history.append({"role": "user", "content": [result]})
        elif self.client.path == RESPONSES:
            what: dict[str, Any] = {
                "type": "function_call",
                "call_id": call,
                "name": "read_file",
                "arguments": arguments,
            }
            self.history += [what, {"type": "function_call_output", "call_id": call, "output": output}]
        elif self.client.path == CHAT:
            function = {"name": "read_file", "arguments": arguments}
            self.history[-1]["tool_calls"] = [{"id": call, "type": "function", "function": function}]
            self.history.append({"role": "tool", "tool_call_id": call, "content": output})
        else:
            self.history.append(output)

    def heard(self, answer: Response) -> None:
        """The answer to it."""
        assert answer.status == 200, answer.body
        told = answer.json()
        self.workers.append(answer.one("x-warmroute-worker"))
        self.sources.append("".join(answer.all("x-warmroute-session-source")))
        for token in answer.all("x-warmroute-session"):
            self.token = token
        if self.client.stored:
            self.previous, self.history = told["id"], []
        elif self.client.path == CHAT:
            self.history.append(told["choices"][0]["message"])
        elif self.client.path == MESSAGES:
            self.history.append({"role": "assistant", "content": told["content"]})
        elif self.client.path == RESPONSES:
            self.history += told["output"]
        else:
            self.history.append(told["text"])


async def all_at_once(running: Running, client: Client, name: str = "s") -> list[Talk]:
    """Every session of ``client``, beside each other; the turns of each one in order."""
    talks = [Talk(client, f"{name}-{number}") for number in range(SESSIONS)]

    async def run(talk: Talk) -> None:
        async with await Raw.connect(running.port) as connection:
            for turn in range(TURNS):
                talk.heard(await connection.ask(talk.next(turn)))

    await asyncio.gather(*(run(talk) for talk in talks))
    return talks


def moved(talks: list[Talk]) -> int:
    """Turns that were answered elsewhere than the first of their session."""
    return sum(worker != talk.workers[0] for talk in talks for worker in talk.workers)


def spread(talks: list[Talk]) -> float:
    """Most sessions on one engine, over the mean."""
    return max(Counter(talk.workers[0] for talk in talks).values()) / (len(talks) / ENGINES)


async def recorded(running: Running) -> dict[str, float]:
    """Requests by what their session was recognised by, as the metrics tell."""
    text = await admin(running, "/metrics")
    families = text_string_to_metric_families(text)
    found = [sample for each in families for sample in each.samples]
    return {s.labels["source"]: s.value for s in found if s.name == "warmroute_session_sources_total"}


async def fleet(gateway: Begin, engine: StartEngine, client: Client) -> Running:
    def change(config: Config) -> None:
        config.sessions.cookie = client.echoes == "cookie"

    engines = [await engine(client.dialect, time_scale=0.0) for _ in range(ENGINES)]
    return await gateway(*engines, policy="cache_aware", change=change)


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
async def test_every_turn_of_a_client_s_sessions_is_at_home_and_the_sessions_are_spread(
    gateway: Begin, engine: StartEngine, client: Client
) -> None:
    running = await fleet(gateway, engine, client)
    talks = await all_at_once(running, client)
    print(f"{client.name}: moved {moved(talks)} of {SESSIONS * (TURNS - 1)}, spread {spread(talks):.3f}")
    assert moved(talks) <= HICCUPS
    assert spread(talks) <= EVEN
    # A client that gives something back is recognised by its content until it has that.
    first = {"content", ""} if client.echoes or client.stored else {client.source}
    assert {talk.sources[0] for talk in talks} <= first
    assert {source for talk in talks for source in talk.sources[1:]} == {client.source}
    told = await recorded(running)
    assert told[client.source] == sum(source == client.source for talk in talks for source in talk.sources)
    assert set(told) <= first | {client.source}
    homes = {target.name: target.homes for target in running.fleet.targets.values()}
    at_home = Counter(talk.workers[-1] for talk in talks)
    assert (len(running.sessions), homes) == (SESSIONS, at_home), "one session for each of the client's, no more"


@pytest.mark.parametrize("client", [CLIENTS[0], NAMELESS], ids=["named", "nameless"])
async def test_sessions_that_come_one_after_the_other_are_spread_too(
    gateway: Begin, engine: StartEngine, client: Client
) -> None:
    running = await fleet(gateway, engine, client)
    talks = [Talk(client, f"s-{number}") for number in range(SESSIONS)]
    async with await Raw.connect(running.port) as connection:
        for talk in talks:
            talk.heard(await connection.ask(talk.next(0)))
        for turn in range(1, 4):
            for talk in talks:
                talk.heard(await connection.ask(talk.next(turn)))
    assert (moved(talks), spread(talks) <= EVEN) == (0, True)


# -- who is whose -------------------------------------------------------------------------------------------------------


def by_turns(running: Running, turns: int) -> list[Session]:
    return [session for session in running.sessions.all() if session.turns == turns]


async def test_sub_agents_are_sessions_of_their_own_and_have_the_parent_that_is_named(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await fleet(gateway, engine, CLIENTS[0])

    async def ask(number: int, turns: int, *lines: str) -> Session:
        talk = Talk(Client("x", "", lambda s, t: Turn(list(lines))), f"a-{number}")
        async with await Raw.connect(running.port) as connection:
            for turn in range(turns):
                talk.heard(await connection.ask(talk.next(turn)))
        assert set(talk.workers) == {talk.workers[0]}
        (found,) = by_turns(running, turns)
        return found

    session = f"x-claude-code-session-id: {uuid('s')}"
    main = await ask(1, 1, session)
    child = await ask(2, 2, session, "x-claude-code-agent-id: a")
    grandchild = await ask(3, 3, session, "x-claude-code-agent-id: b", "x-claude-code-parent-agent-id: a")
    assert (main.parent, child.parent, grandchild.parent) == (None, main.key, child.key)
    codex = await ask(4, 4, f"session-id: {uuid('c')}", f"thread-id: {uuid('c')}")
    thread = await ask(5, 5, f"session-id: {uuid('c')}", f"thread-id: {uuid('t')}")
    helper = await ask(6, 6, f"session-id: {uuid('c')}", f"thread-id: {uuid('c')}", "x-openai-subagent: review")
    assert (codex.parent, thread.parent, helper.parent) == (None, codex.key, codex.key)
    opencode = await ask(7, 7, "x-session-id: ses_1")
    task = await ask(8, 8, "x-session-id: ses_2", "x-parent-session-id: ses_1")
    assert (opencode.parent, task.parent) == (None, opencode.key)
    assert len(running.sessions) == 8


async def test_a_long_chain_of_responses_does_not_keep_new_sessions_from_its_engine(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(*[await engine(time_scale=0.0) for _ in range(2)], policy="cache_aware")
    talk = Talk(Client("responses", "", plain, RESPONSES, stored=True), "s-0")
    others: list[str] = []
    async with await Raw.connect(running.port) as connection:
        for turn in range(12):
            talk.heard(await connection.ask(talk.next(turn)))
        for number in range(11):
            new = Talk(Client("new", "", heads("x-session-id")), f"n-{number}")
            new.heard(await connection.ask(new.next(0)))
            others += new.workers
    assert max(Counter([talk.workers[0], *others]).values()) <= 7, "12 sessions at two engines"


@pytest.mark.parametrize("counts", [False, True])
async def test_the_user_names_a_session_only_where_the_operator_says_so(
    gateway: Begin, engine: StartEngine, counts: bool
) -> None:
    def change(config: Config) -> None:
        config.sessions.fields = ["user"] if counts else []

    running = await gateway(await engine(), policy="cache_aware", change=change)
    for user in ("ann", "bob", "ann"):
        talk = Talk(Client("x", "", said(user=user)), f"{user}-{len(running.sessions)}")
        async with await Raw.connect(running.port) as connection:
            talk.heard(await connection.ask(talk.next(0)))
        assert talk.sources == ["configured" if counts else "content"]
    assert len(running.sessions) == (2 if counts else 3)
