"""Sub-agents that go by their session's name end with it, however it ends, and however many there are."""

from __future__ import annotations

import time

from gateway.naming import Found
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
