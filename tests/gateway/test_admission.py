"""The queue in front of the fleet, and what tenants are granted; over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import AdmissionConfig, Config, LimitsConfig, PriorityConfig, Secret, TenantConfig, WorkerConfig
from gateway.exchange import QUEUED
from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import EVENTS, Scripted, Seen, chunk, ok
from tests.gateway.talk import Raw, Response, admin, chat, once, request, settled, until

LONG = "the quick brown fox jumps over the lazy dog " * 400


class Held:
    """A worker that answers when it is told to, one request after the other."""

    def __init__(self, worker: Scripted, most: int | None = 1) -> None:
        self.worker = worker
        self.config = WorkerConfig(worker.url, engine="generic", max_running=most)
        self._free = asyncio.Semaphore(0)

    async def script(self, seen: Seen) -> None:
        await self._free.acquire()
        await seen.write(ok())

    def let(self, number: int = 1) -> None:
        for _ in range(number):
            self._free.release()

    @property
    def asked(self) -> list[str]:
        """Who was asked for, in order."""
        return [json.loads(seen.body)["user"] for seen in self.worker.seen]


@pytest.fixture
async def held(scripted: StartScripted) -> AsyncIterator[Callable[..., Any]]:
    every: list[Held] = []

    async def begin(most: int | None = 1) -> Held:
        worker = await scripted()
        one = Held(worker, most)
        worker.replies = [one.script]
        every.append(one)
        return one

    yield begin
    for one in every:
        one.let(1000)


def having(*tenants: TenantConfig, **fields: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config.tenants = list(tenants)
        config.admission = AdmissionConfig(**fields)

    return change


def tenant(name: str, **fields: Any) -> TenantConfig:
    return TenantConfig(name, [Secret(f"key-{name}")], **fields)


class Asked:
    """Requests that are under way, each on a connection of its own."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.tasks: dict[str, asyncio.Task[Response]] = {}
        self.clients: dict[str, Raw] = {}

    async def send(self, name: str, *lines: str, key: str | None = None, **fields: Any) -> None:
        """Ask, and wait until the gateway has it."""
        client = self.clients[name] = await Raw.connect(self.running.port)
        before = len(self.running.gateway.exchanges)
        if key is not None:
            lines = (*lines, f"Authorization: Bearer key-{key}")
        self.tasks[name] = asyncio.create_task(client.ask(request(chat(user=name, **fields), *lines)))
        await until(lambda: len(self.running.gateway.exchanges) > before or self.tasks[name].done())

    async def status(self, name: str) -> int:
        return (await self.tasks[name]).status

    @property
    def waiting(self) -> int:
        return sum(exchange.phase == QUEUED for exchange in self.running.gateway.exchanges)


async def metric(running: Running, name: str, **labels: str) -> float:
    text = await admin(running, "/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def told(response: Response, reason: str, status: int = 429) -> None:
    assert response.status == status
    assert response.one("x-warmroute-refused") == reason
    assert int(response.one("retry-after")) >= 1
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert error["code"] == status


# -- the queue ----------------------------------------------------------------------------------------------------------


async def test_nobody_waits_while_a_target_can_take_it(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    for _ in range(20):
        assert (await once(running.port, request(chat(max_tokens=2)))).status == 200
    assert await metric(running, "warmroute_queue_seconds_count") == 0
    assert running.gateway.admission.queues == {}


async def test_what_its_target_cannot_run_waits_here_and_leaves_in_order(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    for name in "abcd":
        await asked.send(name)
    await until(lambda: worker.asked == ["a"])
    assert asked.waiting == 3
    assert await metric(running, "warmroute_queue_requests", priority="interactive") == 3
    assert await metric(running, "warmroute_queue_bytes") > 100
    for number, name in enumerate("abcd"):
        worker.let()
        assert await asked.status(name) == 200
        await until(lambda number=number: worker.asked == list("abcd"[: number + 2]))  # type: ignore[misc]
    assert await metric(running, "warmroute_queue_seconds_count") == 3
    assert await metric(running, "warmroute_queue_requests") == 0
    await settled(running)


async def test_its_target_is_chosen_when_it_leaves(gateway: Begin, held: Any) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config)
    asked = Asked(running)
    for name in "abc":
        await asked.send(name)
    await until(lambda: len(one.asked) + len(two.asked) == 2)
    busy, free = (one, two) if one.asked == ["a"] else (two, one)
    free.let()
    await until(lambda: free.asked == ["b", "c"])
    assert busy.asked == ["a"]


async def test_what_leaves_goes_to_who_has_a_place_not_to_who_holds_its_prompt(gateway: Begin, held: Any) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config, policy="cache_aware")
    asked = Asked(running)

    async def send(name: str, text: str) -> None:
        await asked.send(name, f"x-session-id: {name}", messages=[{"role": "user", "content": text}])

    await send("first", LONG)
    await until(lambda: len(one.asked) + len(two.asked) == 1)
    holds, other = (one, two) if one.asked else (two, one)
    holds.let()
    assert await asked.status("first") == 200
    await send("second", LONG)
    await until(lambda: holds.asked == ["first", "second"])
    await send("else", "something else")
    await until(lambda: other.asked == ["else"])
    await send("third", LONG)
    assert asked.waiting == 1
    other.let()
    await until(lambda: other.asked == ["else", "third"])
    assert holds.asked == ["first", "second"]
    holds.let()
    other.let()
    await settled(running)


async def test_a_client_that_leaves_leaves_the_queue(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    for name in "abc":
        await asked.send(name)
    asked.clients["b"].vanish()
    await until(lambda: asked.waiting == 1)
    worker.let(3)
    assert await asked.status("c") == 200
    assert worker.asked == ["a", "c"]
    assert await metric(running, "warmroute_client_aborts_total", phase="queued") == 1
    await settled(running)


async def test_a_full_queue_is_told_with_the_reason_and_when_to_come_again(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(queue=1))
    asked = Asked(running)
    for name in "ab":
        await asked.send(name)
    told(await once(running.port, request(chat())), "queue_full")
    body = chat(max_tokens=1)
    anthropic = await once(running.port, request(body, path="/v1/messages"))
    assert (anthropic.status, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
    assert anthropic.one("x-warmroute-refused") == "queue_full"
    generate = await once(running.port, request({"text": "a", "sampling_params": {}}, path="/generate"))
    assert generate.status == 429
    assert await metric(running, "warmroute_queue_shed_total", tenant="anonymous", reason="queue_full") == 3
    worker.let(2)
    assert [await asked.status(name) for name in "ab"] == [200, 200]


async def test_the_queue_is_bounded_in_bytes_and_for_each_tenant(gateway: Begin, held: Any) -> None:
    worker = await held()
    change = having(tenant("a"), tenant("b"), bytes=50_000, tenant_queue=2)
    running = await gateway(worker.config, change=change)
    asked = Asked(running)
    await asked.send("first", key="a")
    for name in ("second", "third"):
        await asked.send(name, key="a")
    told(await once(running.port, request(chat(), "Authorization: Bearer key-a")), "tenant_full")
    large = chat(messages=[{"role": "user", "content": "x" * 60_000}])
    assert (await once(running.port, request(large, "Authorization: Bearer key-b"))).status == 429
    await asked.send("fourth", key="b")
    assert asked.waiting == 3


async def test_a_level_has_bounds_of_its_own(gateway: Begin, held: Any) -> None:
    worker = await held()
    levels = {"interactive": PriorityConfig(), "bulk": PriorityConfig(queue=1), "tiny": PriorityConfig(bytes=500)}
    running = await gateway(worker.config, change=having(priorities=levels))
    asked = Asked(running)
    await asked.send("a")
    await asked.send("b", "x-warmroute-priority: bulk")
    told(await once(running.port, request(chat(), "x-warmroute-priority: bulk")), "level_full")
    large = chat(messages=[{"role": "user", "content": "x" * 1000}])
    told(await once(running.port, request(large, "x-warmroute-priority: tiny")), "level_full")
    await asked.send("c")
    assert asked.waiting == 2


async def test_who_waited_for_too_long_is_told(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(deadline=0.2))
    asked = Asked(running)
    await asked.send("a")
    told(await once(running.port, request(chat())), "deadline")
    assert worker.asked == ["a"]
    await settled_after(running, worker)


async def settled_after(running: Running, *workers: Held) -> None:
    for worker in workers:
        worker.let(100)
    await settled(running)


async def test_a_client_says_how_long_it_waits(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    await asked.send("a")
    told(await once(running.port, request(chat(), "x-request-timeout: 200ms")), "deadline")
    for bad in ("soon", "0", "-1", "1e3", "nan", "99999999"):
        response = await once(running.port, request(chat(), f"x-request-timeout: {bad}"))
        assert response.status == 400
        assert "x-request-timeout" in response.json()["error"]["message"]
    assert worker.asked == ["a"]
    await settled_after(running, worker)


async def test_a_worker_that_has_not_begun_within_the_client_s_time_is_left_and_is_not_to_blame(
    gateway: Begin, held: Any
) -> None:
    worker = await held()
    running = await gateway(worker.config)
    response = await once(running.port, request(chat(user="a"), "x-request-timeout: 0.3"))
    assert response.status == 504
    assert response.json()["error"]["type"] == "timeout"
    await worker.worker.one.gone()
    assert await metric(running, "warmroute_worker_faults_total") == 0
    assert await metric(running, "warmroute_requests_total", outcome="timeout") == 1
    assert all(target.breaker.faults == 0 for target in running.fleet.targets.values())
    await settled_after(running, worker)


async def test_a_stream_that_waits_may_have_comments_and_its_refusal_as_an_event(gateway: Begin, held: Any) -> None:
    worker = await held()

    def change(config: Config) -> None:
        config.listen.comment_after = 0.2
        config.admission.deadline = 2.0

    running = await gateway(worker.config, change=change)
    asked = Asked(running)
    await asked.send("a")
    response = await once(running.port, request(chat(stream=True)))
    assert response.status == 200
    assert response.chunks[0].startswith(b":")
    assert b'"rate_limit_error"' in response.body
    assert b"[DONE]" not in response.body
    assert worker.asked == ["a"]


async def test_requests_that_wait_when_the_gateway_stops_are_answered(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    running.config.drain_limit = 30.0
    asked = Asked(running)
    for name in "abc":
        await asked.send(name)
    stopping = asyncio.create_task(running.stop())
    worker.let(3)
    assert [await asked.status(name) for name in "abc"] == [200, 200, 200]
    await stopping


async def test_what_waits_when_the_last_worker_leaves_goes_to_the_next_one(gateway: Begin, held: Any) -> None:
    worker, other = await held(), await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    for name in "ab":
        await asked.send(name)
    await until(lambda: worker.asked == ["a"])
    running.fleet.set_state(next(iter(running.fleet.workers.values())), State.DRAINING, "by the test")
    worker.let()
    assert await asked.status("a") == 200
    running.add_worker(other.config.spec())
    other.let()
    assert await asked.status("b") == 200
    assert other.asked == ["b"]


# -- no worker ----------------------------------------------------------------------------------------------------------


async def test_a_request_may_wait_for_a_worker_that_loads(gateway: Begin, held: Any) -> None:
    worker = await held()
    port = worker.worker.port
    await worker.worker.stop()
    running = await gateway(worker.config, ready=False, change=having(hold=20.0))
    asked = Asked(running)
    await asked.send("a")
    assert asked.waiting == 1
    worker.worker.port = port
    await worker.worker.start()
    worker.let()
    assert await asked.status("a") == 200


async def test_it_does_not_wait_for_ever_and_not_at_all_where_nobody_may_come(gateway: Begin, held: Any) -> None:
    worker = await held()
    await worker.worker.stop()
    running = await gateway(worker.config, ready=False, change=having(hold=0.2))
    response = await once(running.port, request(chat()))
    assert response.status == 503
    assert await metric(running, "warmroute_queue_shed_total", reason="no_worker") == 1
    running.remove_worker(next(iter(running.fleet.workers.values())))
    before = await metric(running, "warmroute_queue_shed_total")
    assert (await once(running.port, request(chat()))).status in (404, 503)
    assert await metric(running, "warmroute_queue_shed_total") == before


# -- priorities and fairness --------------------------------------------------------------------------------------------


async def test_the_first_priority_goes_first(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(tenant("x"), tenant("slow", priority="bulk")))
    asked = Asked(running)
    await asked.send("first", key="x")
    await asked.send("bulk", key="slow")
    await asked.send("modest", "x-warmroute-priority: bulk", key="x")
    await asked.send("pushy", "x-warmroute-priority: interactive", key="slow")
    await asked.send("urgent", key="x")
    worker.let(5)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    assert worker.asked[:2] == ["first", "urgent"]
    assert sorted(worker.asked[2:]) == ["bulk", "modest", "pushy"]
    unknown = await once(running.port, request(chat(), "x-warmroute-priority: royal", "Authorization: Bearer key-x"))
    assert unknown.status == 400
    assert "interactive, bulk" in unknown.json()["error"]["message"]


async def test_levels_and_their_deadlines_are_the_operator_s(gateway: Begin, held: Any) -> None:
    worker = await held()
    levels = {"gold": PriorityConfig(), "tin": PriorityConfig(deadline=0.2)}
    running = await gateway(worker.config, change=having(tenant("a", priority="tin"), tenant("b"), priorities=levels))
    asked = Asked(running)
    await asked.send("first", key="b")
    await asked.send("gold", key="b")
    told(await once(running.port, request(chat(), "Authorization: Bearer key-a")), "deadline")
    assert asked.waiting == 1
    assert await metric(running, "warmroute_queue_shed_total", tenant="a", priority="tin") == 1


async def test_a_tenant_that_floods_does_not_hold_up_another(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(tenant("flood"), tenant("calm")))
    asked = Asked(running)
    prompt = [{"role": "user", "content": LONG}]
    for number in range(30):
        await asked.send(f"flood-{number}", key="flood", messages=prompt)
    for number in range(3):
        await asked.send(f"calm-{number}", key="calm", messages=prompt)
    worker.let(50)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    last = max(worker.asked.index(f"calm-{number}") for number in range(3))
    assert last <= 12, worker.asked


async def test_under_policies_that_read_no_prompt_tenants_pay_for_its_length_too(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, policy="least_load", change=having(tenant("long"), tenant("short")))
    asked = Asked(running)
    await asked.send("first", key="long")
    for number in range(10):
        await asked.send(f"long-{number}", key="long", messages=[{"role": "user", "content": LONG}])
        await asked.send(f"short-{number}", key="short")
    worker.let(50)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    order = [name.split("-")[0] for name in worker.asked[1:]]
    assert order[:14].count("short") >= 9, order


# -- what tenants are granted -------------------------------------------------------------------------------------------


async def test_a_tenant_has_no_more_running_than_it_may_and_the_rest_waits(gateway: Begin, held: Any) -> None:
    worker = await held(most=None)
    running = await gateway(
        worker.config, change=having(tenant("two", limits=LimitsConfig(concurrency=2)), tenant("free"))
    )
    asked = Asked(running)
    for name in "abcd":
        await asked.send(name, key="two")
    await until(lambda: worker.asked == ["a", "b"])
    assert asked.waiting == 2
    assert await metric(running, "warmroute_tenant_running", tenant="two") == 2
    await asked.send("other", key="free")
    await until(lambda: "other" in worker.asked)
    asked.clients["a"].vanish()
    await until(lambda: "c" in worker.asked)
    worker.let(10)
    for name in "bcd":
        assert await asked.status(name) == 200
    await settled(running)
    assert await metric(running, "warmroute_tenant_running", tenant="two") == 0


async def test_a_stored_response_is_no_way_round_that(gateway: Begin, scripted: StartScripted) -> None:
    free = asyncio.Event()

    async def hold(seen: Seen) -> None:
        await free.wait()
        await seen.write(ok(b'{"id":"resp_b","object":"response"}'))

    worker = await scripted(ok(b'{"id":"resp_a","object":"response"}'), hold)
    running = await gateway(worker, change=having(tenant("one", limits=LimitsConfig(concurrency=1))))
    key = "Authorization: Bearer key-one"
    body = {"model": "sim", "input": "hi"}
    assert (await once(running.port, request(body, key, path="/v1/responses"))).status == 200
    more = {**body, "previous_response_id": "resp_a"}
    tasks = [asyncio.create_task(once(running.port, request(more, key, path="/v1/responses"))) for _ in range(2)]
    await until(lambda: [exchange.phase == QUEUED for exchange in running.gateway.exchanges].count(True) == 1)
    assert len(worker.seen) == 2
    free.set()
    assert [(await task).status for task in tasks] == [200, 200]


async def test_permits_come_back_however_requests_end(gateway: Begin, scripted: StartScripted) -> None:
    async def cut(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'))
        seen.reset()

    refused = ok(b'{"error":{"message":"no"}}', status=b"400 Bad Request")
    broken = ok(b"{}", status=b"500 Internal Server Error")
    worker = await scripted(cut, refused, broken, ok())
    running = await gateway(worker, change=having(tenant("one", limits=LimitsConfig(concurrency=1))))
    for stream in (True, False, False, False):
        await once(running.port, request(chat(stream=stream), "Authorization: Bearer key-one"))
    (meter,) = [each for _, each in running.gateway.meters.all()]
    await until(lambda: meter.running == 0)
    assert (await once(running.port, request(chat(), "Authorization: Bearer key-one"))).status == 200
    await until(lambda: meter.running == 0)


async def test_requests_a_minute(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(
        await scripted(), change=having(tenant("a", limits=LimitsConfig(requests_per_minute=3)), tenant("b"))
    )
    answers = [await once(running.port, request(chat(), "Authorization: Bearer key-a")) for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
    told(answers[3], "requests")
    assert 55 <= int(answers[3].one("retry-after")) <= 61
    assert (await once(running.port, request(chat(), "Authorization: Bearer key-b"))).status == 200
    assert await metric(running, "warmroute_tenant_limited_total", tenant="a", limit="requests") == 2


async def test_computed_tokens_a_minute_leave_out_what_was_cached(gateway: Begin, engine: StartEngine) -> None:
    limits = LimitsConfig(computed_tokens_per_minute=6_000)
    running = await gateway(await engine(), policy="cache_aware", change=having(tenant("a", limits=limits)))

    async def ask(word: str) -> Response:
        body = chat(max_tokens=1, messages=[{"role": "user", "content": f"{word} {LONG}"}])
        return await once(running.port, request(body, "Authorization: Bearer key-a"))

    first = await ask("same")
    prompt = first.json()["usage"]["prompt_tokens"]
    assert 3_000 < prompt < 6_000
    for _ in range(5):
        assert (await ask("same")).status == 200
    refused = await ask("other")
    told(refused, "computed_tokens")
    (meter,) = [each for _, each in running.gateway.meters.all()]
    stats = await metric(running, "warmroute_prompt_tokens_total") - await metric(
        running, "warmroute_cached_tokens_total"
    )
    await until(lambda: not running.gateway.exchanges)
    assert meter.computed.total == stats, "as the engine reports them, and not as they were estimated"


async def test_prompt_tokens_a_minute_count_all_of_them(gateway: Begin, engine: StartEngine) -> None:
    limits = LimitsConfig(prompt_tokens_per_minute=10_000)
    running = await gateway(await engine(), policy="round_robin", change=having(tenant("a", limits=limits)))
    body = chat(max_tokens=1, messages=[{"role": "user", "content": LONG}])
    statuses = [(await once(running.port, request(body, "Authorization: Bearer key-a"))).status for _ in range(4)]
    assert Counter(statuses) == {200: 2, 429: 2}


async def test_what_was_not_served_is_not_counted(gateway: Begin, held: Any) -> None:
    worker = await held()
    limits = LimitsConfig(prompt_tokens_per_minute=1_000_000)
    running = await gateway(worker.config, change=having(tenant("a", limits=limits), deadline=0.2))
    asked = Asked(running)
    await asked.send("a", key="a")
    (meter,) = [each for _, each in running.gateway.meters.all()]
    before = meter.prompt.total
    body = chat(messages=[{"role": "user", "content": LONG}])
    assert (await once(running.port, request(body, "Authorization: Bearer key-a"))).status == 429
    assert meter.prompt.total == before
