"""Sub-agents over a restart: that they go by their session's name is not kept."""

from __future__ import annotations

from pathlib import Path

from gateway.config import Config
from gateway.naming import Found
from gateway.sessions import Sessions
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import once, request
from tests.gateway.test_family import AGENT, MAIN
from tests.gateway.test_sessions_adversarial import body, ending, ok


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
