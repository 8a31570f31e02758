"""Whatever stands in heads and bodies, the name of a session is clean, the same every time, and never what it must not be."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings, strategies as st

from gateway.config import Config, ModelConfig, TenantConfig
from gateway.config_reader import Secret
from gateway.dialects import all_dialects
from gateway.naming import LONGEST, Naming
from gateway.sessions import Sessions, keys_of
from gateway.sticky import Sticky
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import admin, chat, once, request

NAMES = [
    "x-session-id", "x_session_id", "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id",
    "session-id", "session_id", "thread-id", "conversation_id", "x-openai-subagent", "x-session-affinity",
    "x-opencode-session", "x-parent-session-id", "x-task-id", "x-openwebui-chat-id", "x-litellm-session-id",
    "x-litellm-trace-id", "x-smg-routing-key", "x-grok-conv-id", "x-correlation-id", "x-warmroute-session", "x-my-session-id",
]  # fmt: skip
NEVER = [
    "authorization", "x-api-key", "api-key", "proxy-authorization", "x-request-id", "traceparent", "tracestate", "b3",
    "x-forwarded-for", "x-real-ip", "forwarded", "user-agent", "host", "x-user-id", "x-tenant-id", "x-codex-turn-state",
    "x-session-final", "x-prompt-cache-isolation-key", "openai-organization",
]  # fmt: skip
SECRET = b"NEVERTHIS"
VALUES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", b"a", b"a" * 256, b"a" * 257, b"\xff", b"a\x00", b"\t"])
)
JSONS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=300)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=6,
)
KEYS = (
    "prompt_cache_key",
    "session_id",
    "litellm_session_id",
    "session_params",
    "metadata",
    "rid",
    "user",
    "conversation",
)
MEMBERS = st.dictionaries(st.sampled_from(KEYS), JSONS, max_size=5)
INNER = st.dictionaries(st.sampled_from(["session_id", "user_id", "id"]), JSONS, max_size=3)

DIALECTS = all_dialects()
PATHS = [(dialect, route) for dialect in DIALECTS.values() for route in dialect.routes.values() if route.generates]


def naming() -> Naming:
    return Naming(Sticky(b"secret"), headers=["x-mine"], fields=[], cookie=True)


@given(
    heads=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    cookie=VALUES,
    members=MEMBERS,
    inner=INNER,
    at=st.integers(0, 99),
)
@example(heads={}, cookie=b"x-warmroute-session=", members={"rid": "_t1"}, inner={}, at=0)
@example(heads={}, cookie=b"", members={"prompt_cache_key": "\x7f"}, inner={"user_id": "{" * 200}, at=0)
@settings(max_examples=400, deadline=None)
def test_whatever_is_said_a_name_is_clean_and_the_same_in_any_order(
    heads: dict[str, bytes], cookie: bytes, members: dict[str, Any], inner: dict[str, Any], at: int
) -> None:
    dialect, route = PATHS[at % len(PATHS)]
    body: dict[str, Any] = {"model": "sim", **members}
    if inner:
        body["metadata"], body["session_params"] = inner, inner
    reading = dialect.read(route, json.dumps(body).encode())
    named = {**{name.encode(): value for name, value in heads.items()}, b"cookie": cookie}
    named |= {name.encode(): SECRET for name in NEVER}
    found = naming().of(named, reading)
    again = naming().of(dict(reversed(list(named.items()))), reading)
    # Two spellings of one header are told apart by their order alone.
    if not any("_" in name for name in heads):
        assert found == again
    memo: dict[object, object] = {}
    assert naming().of(named, reading, memo) == found == naming().of(named, reading, memo)
    if found is None:
        return
    for part in (found.value, found.child, found.parent):
        assert len(part) <= LONGEST
        assert not any(byte < 32 or byte == 127 for byte in part)
        assert part != SECRET
    assert found.value
    key, parent = keys_of(found, "t", "m")
    assert len(key) == 16
    assert parent != key
    assert Sessions().find(found, "t", "m", 1.0).key == key


@given(st.dictionaries(st.sampled_from(NEVER), VALUES.filter(lambda value: b"session" not in value), min_size=1))
@settings(deadline=None)
def test_what_may_not_name_a_session_never_does(heads: dict[str, bytes]) -> None:
    dialect, route = PATHS[0]
    reading = dialect.read(route, b'{"model":"sim","user":"u","safety_identifier":"s","metadata":{"user_id":"u"}}')
    assert naming().of({name.encode(): value for name, value in heads.items()}, reading) is None


def two_of_everything(config: Config) -> None:
    config.tenants = [TenantConfig("a", [Secret("key-a")]), TenantConfig("b", [Secret("key-b")])]
    config.models = {"sim": ModelConfig(aliases=["default", "latest"]), "other": ModelConfig()}


async def test_sessions_are_of_one_tenant_and_one_model_whatever_names_them(
    gateway: Begin, engine: StartEngine
) -> None:
    """Tenants do not meet, whatever they say alike; a model's aliases do."""
    engines = [await engine(models=["sim", "other"], time_scale=0.0) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware", change=two_of_everything)
    long = [{"role": "user", "content": "the very same words " * 30}]
    more = [*long, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}]
    for messages in (long, more):
        for key in ("a", "b"):
            for model in ("sim", "other"):
                for lines in ([], ["x-session-id: one"]):
                    fields = {"messages": messages, "model": model, "max_tokens": 1}
                    sent = request(chat(**fields), f"authorization: Bearer key-{key}", *lines)
                    assert (await once(running.port, sent)).status == 200
    rows = (await admin(running, "/sessions"))["sessions"]
    kinds = sorted((row["tenant"], row["model"], row["source"], row["turns"]) for row in rows)
    assert kinds == sorted(
        (tenant, model, source, 2)
        for tenant in "ab"
        for model in ("other", "sim")
        for source in ("content", "x-session-id")
    )
    for alias in ("default", "latest"):
        sent = request(chat(model=alias, max_tokens=1), "authorization: Bearer key-a", "x-session-id: one")
        assert (await once(running.port, sent)).status == 200
    assert len(running.sessions) == 8
