"""Sub-agents that go by their session's name end with it, however it ends, and however many there are."""

from __future__ import annotations

import time
from pathlib import Path

from gateway.config import Config
from gateway.naming import Found
from gateway.sessions import Sessions
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import once, request
from tests.gateway.test_sessions_adversarial import body, ending, fleet, homes, ok

MAIN = "x-claude-code-session-id: p"
AGENT = "x-claude-code-agent-id: c"


async def test_a_final_request_ends_the_sub_agents_of_its_session_too(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine)
    await ok(running, request(body(), MAIN))
    await ok(running, request(body(), MAIN, AGENT))
    await ok(running, request(body(), MAIN, "x-session-final: 1"))
    assert [session.inner for session in running.sessions.all()] == []


async def test_ending_a_session_of_many_sub_agents_holds_nobody_up(gateway: Begin, engine: StartEngine) -> None:
    """Everybody waits while it is done: it must cost no more than its sub-agents, each once."""
    running, _ = await fleet(gateway, engine)
    await ok(running, request(body(), MAIN))
    await ok(running, request(body(), MAIN, AGENT))
    (agent,) = [session for session in running.sessions.all() if session.inner]
    now = running.fleet.clock()
    for number in range(15_000):
        for child, parent in ((b"a%d" % number, b""), (b"b%d" % number, b"a%d" % number)):
            found = Found(agent.source, b"p", child=child, parent=parent)
            running.sessions.find(found, agent.tenant, agent.model, now)
    begun = time.process_time()
    assert (await once(running.port, ending("p"))).status == 200
    took = time.process_time() - begun
    assert (len(running.sessions), homes(running)) == (0, 0)
    assert took < 1.0, f"{took:.1f} s"


async def test_sub_agents_that_outlive_a_restart_end_with_their_session(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    def kept(config: Config) -> None:
        config.sessions.state = str(tmp_path / "state")

    at = await engine(time_scale=0.0)
    running = await gateway(at, policy="cache_aware", change=kept)
    await ok(running, request(body(), MAIN))
    await ok(running, request(body(), MAIN, AGENT))
    await running.stop()
    again = await gateway(at, policy="cache_aware", change=kept)
    assert len(again.sessions) == 2
    assert (await once(again.port, ending("p"))).status == 200
    assert len(again.sessions) == 0


def test_the_end_of_one_that_was_forgotten_before_leaves_its_successor_s_sub_agents() -> None:
    """Its last request ends after its session was deleted and begun again."""
    store = Sessions()
    main, agent = Found("x-claude-code-session-id", b"p"), Found("x-claude-code-session-id", b"p", child=b"c")
    old = store.find(main, "t", "m", 1.0)
    store.end(old)
    new, child = store.find(main, "t", "m", 2.0), store.find(agent, "t", "m", 2.0)
    store.end(old)
    assert (new.gone, child.gone) == (False, False)
