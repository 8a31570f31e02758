"""An agent that is said to be its own parent."""

from __future__ import annotations

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import request, tell
from tests.gateway.test_sessions_adversarial import body, fleet, ok


async def test_no_session_is_its_own_parent_or_child(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine)
    lines = ["x-claude-code-session-id: p", "x-claude-code-agent-id: c", "x-claude-code-parent-agent-id: c"]
    for _ in range(2):
        await ok(running, request(body(), *lines))
    (session,) = running.sessions.all()
    _, told = await tell(running, "GET", f"/sessions/{session.key.hex()}")
    assert session.parent != session.key
    assert told["children"] == []
