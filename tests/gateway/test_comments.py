"""A client that waits long for a stream is sent comments, if that is configured; what comes after them stays right."""

from gateway.config import Config
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import once, request

CHAT = {"model": "sim", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}


def patient(config: Config) -> None:
    config.listen.comment_after = 0.5


async def test_comments_come_before_a_late_stream_and_are_not_part_of_it(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()
    running = await gateway(started, change=patient)
    started.faults.add("stall_before", count=1, seconds=2.5)
    late = await once(running.port, request(CHAT))
    prompt = await once(running.port, request(CHAT))
    assert late.status == 200
    assert late.body.startswith(b": keep-alive\n\n")
    assert late.body.endswith(b"data: [DONE]\n\n")
    assert b"keep-alive" not in prompt.body


async def test_a_worker_that_fails_after_comments_is_replaced_unseen(gateway: Begin, engine: StartEngine) -> None:
    bad, good = await engine(), await engine()
    running = await gateway(bad, good, change=patient)
    for each in (bad, good):
        each.faults.add("stall_before", count=1, seconds=1.5)
    bad.faults.add("error500", count=5)
    answer = await once(running.port, request(CHAT))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in answer.body


async def test_a_refusal_after_comments_is_an_error_event(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()

    def once_only(config: Config) -> None:
        patient(config)
        config.timeouts.first_byte = 2.0
        config.retries.attempts = 1

    running = await gateway(started, change=once_only)
    started.faults.add("stall_before", count=1, seconds=30)
    answer = await once(running.port, request(CHAT))
    assert answer.status == 200
    assert b'data: {"error":' in answer.body
    assert b"[DONE]" not in answer.body


async def test_requests_without_a_stream_get_no_comments(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()
    running = await gateway(started, change=patient)
    started.faults.add("stall_before", count=1, seconds=2)
    answer = await once(running.port, request({**CHAT, "stream": False}))
    assert answer.status == 200
    assert answer.json()["object"] == "chat.completion"
