"""The control plane does what its document says: generated requests, right ones and wrong ones, against a real gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from gateway.config import Config, Secret
from gateway.openapi import PATHS
from gateway.run import Running
from gateway.workers import State, WorkerSpec, id_of
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import CHAT, admin, chat, once, request, until


def no_defect(context: Any, response: Any, case: Any) -> None:
    """Of all that begins with a 5 only this is no fault of the gateway's: nobody can serve that now."""
    assert response.status_code < 500 or response.status_code == 503


EXAMPLES = 25
"""Of each operation, and of each way to make them: as the document says, and not so."""
CHECKS = (
    no_defect,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
OPERATIONS = [(path, method) for path, item in PATHS.items() for method in item if method != "parameters"]
TOKEN = "admin-token-of-a-test"


def load(running: Running, token: str | None) -> Any:
    url = f"http://127.0.0.1:{running.admin.port}/openapi.json"
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return schemathesis.openapi.from_url(url, headers=headers)


def tame(case: Any) -> None:
    """Workers that do not exist are looked for on this machine alone, and no feed is followed for ever."""
    events = (case.query or {}).get("events")
    if case.path == "/live" and (not case.query or str(events).isdecimal()):
        case.query = {"events": 1}
    if isinstance(case.body, dict) and isinstance(case.body.get("url"), str):
        case.body = {**case.body, "url": "http://127.0.0.1:9"} if case.body["url"].startswith("http") else case.body


def check(schema: Any, path: str, method: str, mode: Any, names: list[str], token: str | None) -> int:
    """Send what is generated; how much that was."""
    operation = schema[path][method.upper()]
    sent = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        nonlocal sent
        tame(case)
        # Half of them ask for what there is.
        if "id" in (case.path_parameters or {}) and sent % 2:
            case.path_parameters = {**case.path_parameters, "id": names[sent // 2 % len(names)]}
        sent += 1
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        case.call_and_validate(headers=headers, checks=list(CHECKS), timeout=30)

    try:
        run()
    except hypothesis.errors.Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing could be made that is as the document says"
    return sent


async def afresh(running: Running, spec: WorkerSpec) -> str:
    """Whatever was done to it, its worker serves; the id of a session."""
    for worker in list(running.fleet.workers.values()):
        if worker.url != spec.url:
            running.remove_worker(worker)
    worker = running.add_worker(spec)
    if worker.state is State.DRAINING:
        running.resume_worker(worker)
    await until(lambda: worker.state is State.READY)
    answer = await once(running.port, request(chat(max_tokens=1), "x-session-id: s"))
    assert answer.status == 200
    return running.sessions.recent(1)[0].key.hex()


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "token"])
async def test_every_answer_is_one_that_the_document_tells_of(
    gateway: Begin, engine: StartEngine, token: str | None
) -> None:
    def change(config: Config) -> None:
        if token is not None:
            config.admin.token = Secret(token)

    running = await gateway(await engine(), change=change, policy="cache_aware")
    schema = await asyncio.to_thread(load, running, token)
    spec = next(iter(running.fleet.workers.values())).spec
    sent = 0
    for path, method in OPERATIONS:
        session = await afresh(running, spec)
        names = [session] if path.startswith("/sessions") else [id_of(spec.url)]
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            sent += await asyncio.to_thread(check, schema, path, method, mode, names, token)
    assert sent > 200
    assert running.gateway.defects == 0


async def test_what_it_tells_of_is_what_there_is(gateway: Begin, engine: StartEngine) -> None:
    """Each route of the site, each method of it; and the answers that generated requests seldom get."""
    running = await gateway(await engine(), policy="cache_aware")
    document = await admin(running, "/openapi.json")
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in running.admin._application().router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == set(OPERATIONS)
    assert set(document["paths"]) == {path for path, _ in OPERATIONS}
    assert json.loads(json.dumps(PATHS)) == document["paths"]
    schema = await asyncio.to_thread(load, running, None)
    await once(running.port, request(chat(max_tokens=1), "x-session-id: s"))
    session = running.sessions.recent(1)[0].key.hex()
    worker = next(iter(running.fleet.workers))

    def call(path: str, method: str, **parts: Any) -> int:
        case = schema[path][method].Case(**parts)
        return int(case.call_and_validate(checks=list(CHECKS), timeout=30).status_code)

    at = {"id": session}
    for path, method, parts, status in (
        ("/sessions/{id}", "GET", {"path_parameters": at}, 200),
        ("/sessions/{id}/move", "POST", {"path_parameters": at, "body": {"to": worker}}, 200),
        ("/sessions/{id}/move", "POST", {"path_parameters": at, "body": {"to": "nobody"}}, 400),
        ("/route", "POST", {"body": chat()}, 200),
        ("/route", "POST", {"body": chat(), "query": {"path": CHAT}}, 200),
        ("/route", "POST", {"body": chat(model="none")}, 404),
        ("/workers/{id}", "GET", {"path_parameters": {"id": worker}}, 200),
        ("/workers/{id}/drain", "POST", {"path_parameters": {"id": worker}}, 202),
        ("/route", "POST", {"body": chat()}, 503),
        ("/readyz", "GET", {}, 503),
        ("/workers/{id}", "PATCH", {"path_parameters": {"id": worker}, "body": {"state": "ready"}}, 200),
        ("/sessions/{id}", "DELETE", {"path_parameters": at}, 200),
        ("/workers/{id}", "DELETE", {"path_parameters": {"id": worker}}, 200),
        ("/config/reload", "POST", {}, 409),
    ):
        assert await asyncio.to_thread(call, path, method, **parts) == status, (path, method)
