"""One token names one session at every gateway that shares the key, and one of each model."""

from __future__ import annotations

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.replicas.test_tokens_shared import asking, two
from tests.gateway.talk import once, request
from tests.gateway.test_sessions_adversarial import body, ending, fleet, homes, ok

NUMBER = 12


async def test_a_session_goes_from_gateway_to_gateway_and_stays_at_its_home(
    gateway: Begin, engine: StartEngine
) -> None:
    """As behind a balancer that knows nothing of sessions: every turn comes to the other one."""
    both = await two(gateway, engine)
    tokens, workers = [""] * NUMBER, [""] * NUMBER
    for turn in range(6):
        for number in range(NUMBER):
            lines = [f"x-warmroute-session: {tokens[number]}"] if turn else []
            answer = await once(both[(turn + number) % 2].port, asking(number, turn, *lines))
            assert answer.status == 200
            worker = answer.one("x-warmroute-worker")
            assert worker == (workers[number] or worker), f"turn {turn} of {number}"
            assert answer.one("x-warmroute-session-source") == ("sticky" if turn else "content")
            tokens[number], workers[number] = answer.one("x-warmroute-session"), worker
    assert [len(each.sessions) for each in both] == [NUMBER, NUMBER]
    for number, token in enumerate(tokens):
        for each in both:
            ended = await once(each.port, ending(token))
            assert ended.status == 200, f"{number}: {ended.body!r}"
            assert (await once(each.port, ending(token))).status == 404
    assert [(len(each.sessions), homes(each)) for each in both] == [(0, 0), (0, 0)]


async def test_a_client_of_two_models_that_keeps_the_newest_token_has_two_sessions(
    gateway: Begin, engine: StartEngine
) -> None:
    """As a cookie jar does: each model's answer brings a token, and the next request goes to the other model."""
    running, _ = await fleet(gateway, engine, 2, models=["sim", "other"])
    token = (await ok(running, request(body(3)))).one("x-warmroute-session")
    for turn in range(5):
        for model in ("other", "sim"):
            sent = request({**body(4 + turn), "model": model}, f"x-warmroute-session: {token}")
            token = (await ok(running, sent)).one("x-warmroute-session")
    assert sorted((session.model, session.turns) for session in running.sessions.all()) == [("other", 5), ("sim", 6)]
