"""Who a request belongs to, and a store that is bounded and counts homes exactly."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from gateway.config import Config
from gateway.content import end_of
from gateway.dialects import Reading, all_dialects
from gateway.naming import Found
from gateway.prompt import Prompt, Thinking
from gateway.sessions import Session, Sessions
from gateway.sticky import Sticky
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, once, request

DIALECTS = all_dialects()
PATHS = {path: (dialect, route) for dialect in DIALECTS.values() for path, route in dialect.routes.items()}
UUID = "0b9a6f0e-4c1d-4b7f-9a55-3d1f2e7c8a90"
OTHER = "77777777-4c1d-4b7f-9a55-3d1f2e7c8a90"
SECRET, KEY = b"secret of the tests", b"k" * 16
TOKEN = Sticky(SECRET).seal(0, KEY, 0).decode()
OLD_CLAUDE = f"user_{'ab12' * 16}_account_{OTHER}_session_{UUID}"
NEW_CLAUDE = json.dumps({"device_id": "d" * 64, "account_uuid": OTHER, "session_id": UUID})


def remember(store: Sessions, session: Session, prompt: Prompt, scope: int) -> None:
    """What the end of a request does."""
    said = end_of(prompt, scope)
    if said is not None:
        store.remember_content(session, said)


def read(body: dict[str, Any], path: bytes = b"/v1/chat/completions") -> Reading:
    dialect, route = PATHS[path]
    return dialect.read(route, json.dumps({"model": "sim", **body}).encode())


def name(
    headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, *, configured: tuple[str, ...] = ()
) -> Found | None:
    """What the store makes of lower-case headers and a body."""
    named = {key.encode(): value.encode() for key, value in (headers or {}).items()}
    path = b"/v1/responses" if body and "conversation" in body else b"/v1/chat/completions"
    return Sessions(headers=configured, secret=SECRET).name(named, read(body or {}, path))


# Headers and bodies of the clients in order of precedence: what comes earlier wins.
ORDER: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("configured", {"x-my-session": "v"}, {}),
    ("sticky", {"x-warmroute-session": TOKEN}, {}),
    ("conversation", {}, {"conversation": {"id": "v"}}),
    ("x-session-id", {"x-session-id": "v"}, {}),
    ("x-claude-code-session-id", {"x-claude-code-session-id": "v"}, {}),
    ("session-id", {"session-id": "v"}, {}),
    ("thread-id", {"thread-id": "v"}, {}),
    ("conversation-id", {"conversation-id": "v"}, {}),
    ("x-session-affinity", {"x-session-affinity": "v"}, {}),
    ("x-opencode-session", {"x-opencode-session": "v"}, {}),
    ("x-task-id", {"x-task-id": "v"}, {}),
    ("x-openwebui-chat-id", {"x-openwebui-chat-id": "v"}, {}),
    ("x-litellm-session-id", {"x-litellm-session-id": "v"}, {}),
    ("x-litellm-trace-id", {"x-litellm-trace-id": "v"}, {}),
    ("x-smg-routing-key", {"x-smg-routing-key": "v"}, {}),
    ("x-grok-conv-id", {"x-grok-conv-id": "v"}, {}),
    ("x-*-session-id", {"x-some-agent-session-id": "v"}, {}),
    ("prompt_cache_key", {}, {"prompt_cache_key": "v"}),
    ("session_id", {}, {"session_id": "v"}),
    ("litellm_session_id", {}, {"litellm_session_id": "v"}),
    ("session_params", {}, {"session_params": {"id": "v"}}),
    ("metadata.session_id", {}, {"metadata": {"session_id": "v"}}),
    ("rid", {}, {"rid": "v"}),
    ("metadata.user_id", {}, {"metadata": {"user_id": OLD_CLAUDE.replace(UUID, "0123abcd")}}),
    ("x-correlation-id", {"x-correlation-id": "v"}, {}),
]


@pytest.mark.parametrize(("source", "headers", "body"), ORDER, ids=[row[0] for row in ORDER])
def test_every_client_s_way_of_naming_a_session_is_known(
    source: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    found = name(headers, body, configured=("X-My_Session",))
    assert found is not None
    assert found.source == source
    assert found.value == {"metadata.user_id": b"0123abcd", "sticky": KEY}.get(source, b"v")
    assert found.child == b""


@pytest.mark.parametrize("at", range(len(ORDER) - 1), ids=[f"{a[0]}>{b[0]}" for a, b in pairwise(ORDER)])
def test_what_comes_earlier_in_the_order_wins(at: int) -> None:
    (source, headers, body), *later = ORDER[at:]
    for _, more, further in [later[0], later[-1]]:
        both: dict[str, Any] = {**further, **body}
        if "metadata" in further and "metadata" in body:
            both["metadata"] = {**further["metadata"], **body["metadata"]}
        # The order in which the client writes them does not matter.
        for fields in ({**headers, **more}, {**more, **headers}):
            found = name(fields, both, configured=("x-my-session",))
            assert found is not None
            assert found.source == source


def test_of_several_configured_headers_the_first_configured_wins() -> None:
    found = name({"x-b": "b", "x-a": "a"}, configured=("x-a", "x-b"))
    assert found == Found("configured", b"a")


@pytest.mark.parametrize("header", ["session_id", "conversation_id", "thread_id", "x_session_id", "x_task_id"])
def test_underscores_and_dashes_in_names_are_the_same(header: str) -> None:
    found = name({header: "v"})
    assert found is not None
    assert found.source == header.replace("_", "-")
    assert found == name({header.replace("_", "-"): "v"})


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {"user": "somebody"}),
        ({"x-request-id": "r-1"}, {}),
        ({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, {}),
        ({"authorization": "Bearer secret", "x-api-key": "secret", "cookie": "session-id=3"}, {}),
        ({"x-forwarded-for": "10.1.1.1", "x-real-ip": "10.1.1.1", "forwarded": "for=10.1.1.1"}, {}),
        ({"x-parent-session-id": "v"}, {}),
        ({"x-claude-code-agent-id": "v", "x-claude-code-parent-agent-id": "w"}, {}),
        ({}, {"metadata": {"user_id": "somebody"}}),
        ({}, {"metadata": {"user_id": UUID}}),
        ({}, {"metadata": {"user_id": f"user_someone_session_{UUID}"}}),
        ({}, {"metadata": {"user_id": f"x{OLD_CLAUDE}"}}),
        ({}, {"metadata": {"user_id": json.dumps({"account_uuid": OTHER})}}),
        ({}, {"metadata": {"user_id": json.dumps([UUID])}}),
        ({}, {"metadata": {"user_id": '{"session_id": 3}'}}),
        ({}, {"metadata": {"user_id": "{"}}),
        ({}, {"metadata": {"user_id": {"session_id": UUID}}}),
        ({}, {"metadata": "v", "session_params": "v", "rid": ["v"], "session_id": 3, "prompt_cache_key": None}),
        ({}, {"session_params": {"id": 7}, "metadata": {"session_id": ""}, "rid": ""}),
        ({"x-session-id": "", "session-id": ""}, {"prompt_cache_key": ""}),
    ],
)
def test_nothing_else_names_a_session(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert name(headers, body) is None


@pytest.mark.parametrize("user_id", [OLD_CLAUDE, NEW_CLAUDE])
def test_claude_code_s_user_id_gives_its_session_and_nothing_of_the_account(user_id: str) -> None:
    assert name({}, {"metadata": {"user_id": user_id}}) == Found("metadata.user_id", UUID.encode())


@pytest.mark.parametrize("suffix", ["", "_t0", "_t12", "_r3"])
def test_a_rid_is_told_without_its_turn_or_attempt(suffix: str) -> None:
    assert name({}, {"rid": f"chain_7{suffix}"}) == Found("rid", b"chain_7")


def test_a_rid_that_only_looks_like_having_a_turn_stays_whole() -> None:
    for rid in ("chain_t", "chain_x3", "t3", "chain_t3b"):
        assert name({}, {"rid": rid}) == Found("rid", rid.encode())


LONG = "k" * 256


@pytest.mark.parametrize(
    ("source", "headers", "body"),
    [
        ("configured", {"x-my-session": "%s"}, {}),
        ("x-session-id", {"x-session-id": "%s"}, {}),
        ("x-claude-code-session-id", {"x-claude-code-session-id": "%s"}, {}),
        ("x-*-session-id", {"x-any-session-id": "%s"}, {}),
        ("conversation", {}, {"conversation": "%s"}),
        ("prompt_cache_key", {}, {"prompt_cache_key": "%s"}),
        ("x-correlation-id", {"x-correlation-id": "%s"}, {}),
    ],
)
def test_a_key_of_256_bytes_is_believed_and_a_longer_or_unclean_one_is_not(
    source: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    def found(value: str) -> Found | None:
        return name(
            {key: text % value for key, text in headers.items()},
            {key: text % value for key, text in body.items()},
            configured=("x-my-session",),
        )

    assert found(LONG) == Found(source, LONG.encode())
    assert found(LONG + "k") is None
    # 256 letters, but more bytes.
    assert found("é" + "k" * 255) is None
    for bad in ("a\tb", "a\x01b", "a\x7fb", "a\nb", "a\x00"):
        assert found(bad) is None


def test_a_key_that_is_not_believed_gives_way_to_the_next_header() -> None:
    assert name({"x-session-id": LONG + "k", "x-task-id": "t"}) == Found("x-task-id", b"t")
    assert name({"x-claude-code-session-id": "a\x01", "session-id": "s"}) == Found("session-id", b"s")


def test_sessions_are_scoped_by_tenant_and_model() -> None:
    store = Sessions()
    found = Found("x-session-id", b"one")
    keys = {store.find(found, tenant, model, 1.0).key for tenant in ("a", "b") for model in ("m", "n")}
    assert len(keys) == len(store) == 4
    assert store.find(found, "a", "m", 2.0) is store.find(Found("rid", b"one"), "a", "m", 3.0), "the name counts"
    assert len(store) == 4


def test_a_sub_agent_of_claude_code_is_a_child_session() -> None:
    store = Sessions()
    main = name({"x-claude-code-session-id": UUID})
    child = name({"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a1"})
    sibling = name({"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a2"})
    assert main is not None
    assert child is not None
    assert sibling is not None
    mother = store.find(main, "t", "m", 1.0)
    first, second = store.find(child, "t", "m", 1.0), store.find(sibling, "t", "m", 1.0)
    assert len({mother.key, first.key, second.key}) == 3
    assert mother.parent is None
    assert first.parent == second.parent == mother.key
    assert store.find(child, "t", "m", 2.0) is first
    # The same agent id in another session is another child.
    other = name({"x-claude-code-session-id": OTHER, "x-claude-code-agent-id": "a1"})
    assert other is not None
    assert store.find(other, "t", "m", 2.0).key != first.key


def test_a_dry_run_stores_and_touches_nothing() -> None:
    store = Sessions()
    old = store.find(Found("rid", b"old"), "t", "m", 1.0)
    store.find(Found("rid", b"newer"), "t", "m", 2.0)
    assert store.find(Found("rid", b"old"), "t", "m", 9.0, dry=True) is old
    assert old.used == 1.0
    assert store.recent(2)[-1] is old
    store.find(Found("rid", b"unseen"), "t", "m", 9.0, dry=True)
    assert len(store) == 2
    prompt = prompt_of([user("hello")])
    seen = store.by_content(prompt, 5, "t", "m", 9.0, dry=True)
    assert len(store) == 2
    made = store.by_content(prompt, 5, "t", "m", 9.0)
    assert seen is not None
    assert made is not None
    assert seen.hash == made.hash, "what a dry run says of a new session is what the next request gets"
    again = store.by_content(prompt, 5, "t", "m", 9.0)
    assert again is not None
    assert again.key != made.key


def test_the_store_keeps_no_value_of_a_client() -> None:
    store = Sessions()
    found = Found("x-session-id", b"very-secret-name", b"secret-agent")
    session = store.find(found, "t", "m", 1.0)
    prompt = prompt_of([user("secret words")])
    said = store.by_content(prompt, 3, "t", "m", 1.0)
    assert said is not None
    remember(store, said, prompt, 3)
    for text in (repr(session), repr(said), repr(store.recent(9)), repr(vars(store)), repr(store)):
        assert "secret" not in text.replace("_secret", "")
    assert len(session.key) == 16


# -- content ------------------------------------------------------------------------------------------------------------


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def prompt_of(messages: list[dict[str, Any]], path: bytes = b"/v1/chat/completions", **fields: Any) -> Prompt:
    make = read({"messages": messages, **fields}, path).make_prompt
    assert make is not None
    return make(Thinking.STRIP)


SYSTEM = {"role": "system", "content": "You are a careful agent. " * 200}


class Talk:
    """One store, asked as the gateway asks it."""

    def __init__(self) -> None:
        self.store = Sessions()
        self.now = 0.0

    def say(self, prompt: Prompt, scope: int = 1) -> Session | None:
        self.now += 1.0
        session = self.store.by_content(prompt, scope, "t", "m", self.now)
        if session is not None:
            remember(self.store, session, prompt, scope)
        return session


@pytest.mark.parametrize("added", range(1, 7))
def test_a_chat_that_extends_the_whole_of_an_earlier_one_joins_it(added: int) -> None:
    talk = Talk()
    messages: list[dict[str, Any]] = [SYSTEM, user("do it")]
    first = talk.say(prompt_of(messages))
    more = [assistant("I do"), tool("done"), assistant("more"), tool("done too"), assistant("so"), user("and now?")]
    for _ in range(5):
        messages = [*messages, *more[:added]]
        assert talk.say(prompt_of(messages)) is first
    assert len(talk.store) == 1


def test_a_shared_start_never_joins_two_sessions() -> None:
    talk = Talk()
    start = [SYSTEM, user("read the repository"), assistant("read"), tool("files")]
    first = talk.say(prompt_of(start[:2]))
    assert talk.say(prompt_of([SYSTEM, user("another task")])) is not first
    # A task that begins with the same messages but was never seen to end there is a session of its own.
    assert talk.say(prompt_of([SYSTEM, user("another"), assistant("x"), user("y")])) is not first
    assert len(talk.store) == 3


def test_identical_first_prompts_are_sessions_of_their_own() -> None:
    talk = Talk()
    sessions = {id(talk.say(prompt_of([SYSTEM, user("hi")]))) for _ in range(20)}
    assert len(sessions) == len(talk.store) == 20


def test_a_system_prompt_alone_never_joins() -> None:
    talk = Talk()
    alone = talk.say(prompt_of([SYSTEM]))
    assert alone is not None
    others = [talk.say(prompt_of([SYSTEM, user(f"task {at}")])) for at in range(5)]
    assert len({id(each) for each in others}) == 5, "they did not become one session"


def test_a_chat_whose_middle_was_changed_is_another_session() -> None:
    talk = Talk()
    first = talk.say(prompt_of([SYSTEM, user("a"), assistant("b"), user("c")]))
    assert talk.say(prompt_of([SYSTEM, user("A"), assistant("b"), user("c"), assistant("d"), user("e")])) is not first
    assert talk.say(prompt_of([SYSTEM, user("a"), assistant("b"), user("c"), assistant("d"), user("e")])) is first


def test_lineage_is_scoped() -> None:
    talk = Talk()
    first = talk.say(prompt_of([user("a")]), scope=1)
    longer = prompt_of([user("a"), assistant("b"), user("c")])
    assert talk.say(longer, scope=2) is not first
    assert talk.say(longer, scope=1) is first


@pytest.mark.parametrize(
    "steps",
    [1, 3, 8],
)
def test_thinking_that_the_template_drops_does_not_break_lineage(steps: int) -> None:
    """Within one turn of the user the thinking stays in the prompt; the next one drops it."""
    talk = Talk()
    messages = [SYSTEM, user("a")]
    first = talk.say(prompt_of(messages))
    for at in range(steps):
        messages += [{"role": "assistant", "content": f"b{at}", "reasoning_content": "hm " * 50}, tool(f"r{at}")]
        assert talk.say(prompt_of(messages)) is first
    assert talk.say(prompt_of([*messages, assistant("so"), user("next")])) is first


def test_a_completion_without_messages_gives_no_lineage() -> None:
    talk = Talk()
    for body in ({"prompt": "once upon"}, {"prompt": [1, 2, 3]}, {"prompt": ["a", "b"]}, {}):
        make = read(body, b"/v1/completions").make_prompt
        assert make is not None
        assert talk.say(make(Thinking.STRIP)) is None
    assert talk.say(prompt_of([])) is None
    assert len(talk.store) == 0


def test_claude_code_s_billing_line_does_not_break_lineage() -> None:
    talk = Talk()

    def turn(number: int) -> Prompt:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={xxh3_64_intdigest(b'%d' % number):x};"
        system = [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ]
        messages: list[dict[str, Any]] = [user([{"type": "text", "text": "fix it"}])]
        for at in range(number):
            messages.append(
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": f"t{at}", "name": "Read", "input": {"at": at}}],
                }
            )
            result = {"type": "tool_result", "tool_use_id": f"t{at}", "content": f"file {at}"}
            messages.append(user([result]))
        # The mark of the cache moves to the last block with every turn.
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return prompt_of(messages, b"/v1/messages", system=system)

    first = talk.say(turn(0))
    assert first is not None
    assert turn(0).text == turn(0).text
    for number in range(1, 6):
        assert talk.say(turn(number)) is first


def test_of_several_that_said_the_same_each_goes_on_once() -> None:
    talk = Talk()
    three = [talk.say(prompt_of([user("same")])) for _ in range(3)]
    assert len({id(session) for session in three}) == 3
    again = [talk.say(prompt_of([user("same"), assistant(f"x {at}"), user("y")])) for at in range(3)]
    assert {id(session) for session in again} == {id(session) for session in three}
    # Whoever goes on from there now goes another way than all of them: as a retry of the newest.
    assert talk.say(prompt_of([user("same"), assistant("z"), user("y")])) in three


def test_the_length_of_the_answer_tells_which_of_them_goes_on() -> None:
    talk = Talk()
    long, short = [talk.say(prompt_of([user("same")])) for _ in range(2)]
    assert long is not None
    assert short is not None
    long.tail_tokens, short.tail_tokens = 500, 10
    assert talk.say(prompt_of([user("same"), assistant("word " * 8), user("y")])) is short
    assert talk.say(prompt_of([user("same"), assistant("word " * 400), user("y")])) is long


# -- the store ----------------------------------------------------------------------------------------------------------


def test_the_store_is_bounded_and_the_oldest_goes() -> None:
    store = Sessions(most=3)
    for at in range(5):
        store.find(Found("rid", b"%d" % at), "t", "m", float(at))
        if at == 3:
            store.find(Found("rid", b"1"), "t", "m", 3.5)
    assert len(store) == 3
    assert store.dropped == 2
    left = {session.key for session in store.recent(10)}
    assert left == {store.find(Found("rid", name), "t", "m", 9.0, dry=True).key for name in (b"1", b"3", b"4")}


def test_idle_sessions_are_forgotten() -> None:
    store = Sessions(idle=10.0)
    for at in range(5):
        store.find(Found("rid", b"%d" % at), "t", "m", float(at))
    store.find(Found("rid", b"0"), "t", "m", 8.0)
    store.sweep(13.0)
    assert len(store) == 2
    assert store.expired == 3


def test_a_session_forgotten_while_its_request_runs_stays_forgotten() -> None:
    homes: Counter[int] = Counter()
    store = Sessions(homes=lambda target, change: homes.update({target: change}))
    prompt, longer = prompt_of([user("a")]), prompt_of([user("a"), assistant("b"), user("c")])
    session = store.by_content(prompt, 1, "t", "m", 1.0)
    assert session is not None
    store.bind(session, 4)
    store.drop(session)
    store.bind(session, 5)
    remember(store, session, prompt, 1)
    assert not any(homes.values())
    later = store.by_content(longer, 1, "t", "m", 2.0)
    assert later is not None
    assert later is not session
    assert len(store) == 1


class Store(RuleBasedStateMachine):
    """Any sequence of what the gateway does, against a model of homes."""

    MOST = 5

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[int] = Counter()
        self.store = Sessions(most=self.MOST, idle=20.0, homes=self.change)
        self.now = 0.0
        self.known: list[Session] = []
        self.chats: dict[int, list[str]] = {}

    def change(self, target: int, by: int) -> None:
        self.counted[target] += by
        assert self.counted[target] >= 0

    @rule(value=st.integers(0, 8), seconds=st.integers(0, 4))
    def find(self, value: int, seconds: int) -> None:
        self.now += seconds
        self.known.append(self.store.find(Found("rid", b"%d" % value), "t", "m", self.now))

    @rule(chat=st.integers(0, 3), words=st.sampled_from("ab"), seconds=st.integers(0, 4))
    def say(self, chat: int, words: str, seconds: int) -> None:
        self.now += seconds
        said = self.chats.setdefault(chat, [])
        said.append(words)
        prompt = prompt_of([user(f"{at}{word}") for at, word in enumerate(said)])
        session = self.store.by_content(prompt, 1, "t", "m", self.now)
        assert session is not None
        self.known.append(session)
        remember(self.store, session, prompt, 1)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000), at=st.integers(0, 2))
    def bind(self, pick: int, at: int) -> None:
        self.store.bind(self.known[pick % len(self.known)], at)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000))
    def unbind(self, pick: int) -> None:
        self.store.unbind(self.known[pick % len(self.known)])

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000))
    def drop(self, pick: int) -> None:
        self.store.drop(self.known[pick % len(self.known)])

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 1000), chat=st.integers(0, 3))
    def remember(self, pick: int, chat: int) -> None:
        said = self.chats.get(chat, ["x"])
        prompt = prompt_of([user(f"{at}{word}") for at, word in enumerate(said)])
        remember(self.store, self.known[pick % len(self.known)], prompt, 1)

    @rule(at=st.integers(0, 2))
    def unbind_all(self, at: int) -> None:
        self.store.unbind_all(at)
        assert self.counted[at] == 0

    @rule(seconds=st.integers(0, 30))
    def sweep(self, seconds: int) -> None:
        self.now += seconds
        self.store.sweep(self.now)
        assert all(session.used > self.now - 20.0 for session in self.store.recent(100))

    @invariant()
    def homes_are_exact(self) -> None:
        live = self.store.recent(100)
        assert len(live) == len(self.store) <= self.MOST
        wanted = Counter(session.home for session in live if session.home is not None)
        assert +self.counted == wanted
        used = [session.used for session in live]
        assert used == sorted(used, reverse=True)

    @invariant()
    def what_was_said_is_kept_for_live_sessions_only(self) -> None:
        ends = self.store.ends
        ends.check()
        assert len(ends) <= 4 * self.MOST
        for session in self.store.recent(100):
            assert all(session in ends.claims(end) for end in session.ends)


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- over HTTP ----------------------------------------------------------------------------------------------------------


async def sources(running: Any) -> list[tuple[str, str, str]]:
    rows = (await admin(running, "/sessions"))["sessions"]
    return [(row["source"], row["tenant"], row["model"]) for row in rows]


async def test_names_of_headers_are_blind_to_case_and_to_dashes_over_http(gateway: Begin, engine: StartEngine) -> None:
    def own(config: Config) -> None:
        config.sessions.headers = ["X-My-Session"]

    running = await gateway(await engine(), policy="cache_aware", change=own)
    for line in ("X-Session-Id: abc", "x-SESSION-id: abc", "X_Session_ID: abc", "x-session-id:abc"):
        answer = await once(running.port, request(chat(max_tokens=1), line))
        assert answer.status == 200
        assert answer.one("x-warmroute-session-source") == "x-session-id"
    assert await sources(running) == [("x-session-id", "anonymous", "sim")]
    row = (await admin(running, "/sessions"))["sessions"][0]
    assert row["turns"] == 4
    assert row["running"] == 0
    assert row["home"]
    for line in ("X-MY_SESSION: 9", "x-my-session: 9"):
        answer = await once(running.port, request(chat(max_tokens=1), line, "x-session-id: abc"))
        assert answer.one("x-warmroute-session-source") == "configured"
    assert (await admin(running, "/sessions"))["total"] == 2
    text = json.dumps(await admin(running, "/sessions")) + await admin(running, "/metrics")
    assert "abc" not in text.replace("abcdef", "")


async def test_a_head_that_repeats_on_one_connection_still_names_the_session_of_its_own_request(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        for session in ("a", "b", "a", "a", "c", "b"):
            await client.ask(request(chat(max_tokens=1), f"x-session-id: {session}"))
    rows = (await admin(running, "/sessions"))["sessions"]
    assert sorted(row["turns"] for row in rows) == [1, 2, 3]


async def test_a_session_deleted_between_two_turns_is_placed_anew(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    messages: list[dict[str, Any]] = [user("hello")]
    for turn in range(4):
        answer = await once(running.port, request({"model": "sim", "max_tokens": 1, "messages": messages}))
        assert answer.status == 200
        messages += [assistant("x"), user(f"turn {turn}")]
        for session in running.sessions.recent(9):
            running.sessions.drop(session)
    assert [target.homes for target in running.fleet.targets.values()] == [0]


async def test_a_session_forgotten_while_it_streams_harms_nobody(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    messages = [user("hello")]
    body = {"model": "sim", "stream": True, "max_tokens": 200, "ignore_eos": True, "messages": messages}
    async with await Raw.connect(running.port) as client:
        await client.send(request(body))
        await client.head()
        for session in running.sessions.recent(9):
            running.sessions.drop(session)
        assert len(running.sessions) == 0
        while b"[DONE]" not in await client.reader.readuntil(b"\n\n"):
            pass
    longer = [*messages, assistant("x"), user("on")]
    answer = await once(running.port, request({"model": "sim", "max_tokens": 1, "messages": longer}))
    assert answer.status == 200
    assert [target.homes for target in running.fleet.targets.values()] == [1]
    assert len(running.sessions) == 1
