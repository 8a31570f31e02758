"""The control plane's OpenAPI document: what each path takes, answers and refuses.

It is written by hand, for people and for generated clients; a test has generated requests sent to a real gateway and holds
every answer against it, so a path, a status or a key that is not in here fails there. Objects may gain keys: clients ignore
what they do not know.
"""

from typing import Any

from gateway.leases import LONGEST, SHORTEST
from gateway.live import MOST_EVENTS
from gateway.page import KINDS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}


def maybe(schema: Schema) -> Schema:
    """... or null: not known."""
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": schema}


def each(schema: Schema) -> Schema:
    """An object whose keys are names."""
    return {"type": "object", "additionalProperties": schema}


def objects(**properties: Schema) -> Schema:
    """An object that always has these keys."""
    return {"type": "object", "required": list(properties), "properties": properties}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(description: str, schema: Schema, **more: Any) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}, **more}


RETRY = {
    "retry-after": {"description": "Seconds.", "required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}
}
ERRORS: dict[int, Schema] = {
    400: _json("Something in the request is wrong; the message says what, and how to cure it.", ref("Error")),
    401: _json(
        "The admin token is missing or wrong.",
        ref("Error"),
        headers={"www-authenticate": {"required": True, "schema": {"type": "string", "const": "Bearer"}}},
    ),
    403: _json("A request of another site, or by a name that is not this machine's.", ref("Error")),
    404: _json("There is none of that name.", ref("Error")),
    405: _json(
        "The path takes other methods.",
        ref("Error"),
        headers={"allow": {"required": True, "schema": {"type": "string"}}},
    ),
    408: _json("The body did not come in time.", ref("Error")),
    409: _json("Not with this gateway as it was started.", ref("Error")),
    413: _json("The body is too large.", ref("Error")),
    415: _json("The body is not said to be JSON, by a browser.", ref("Error")),
    429: _json("Too many wrong tokens came from this address.", ref("Error"), headers=RETRY),
    503: _json("Nobody can serve that now.", ref("Error")),
}
ALWAYS = (400, 401, 403, 405, 413, 415, 429)
"""What any request may be answered."""


def operation(summary: str, done: Schema, *more: int, status: int = 200, **parts: Any) -> Schema:
    """One method of one path; ``more``: statuses that it may be refused with, beside those of any."""
    responses = {str(code): ERRORS[code] for code in sorted({*ALWAYS, *more})}
    return {"summary": summary, "responses": {str(status): done, **responses}, **parts}


def body(schema: Schema, required: bool = True) -> Schema:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def query(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def named(what: str) -> Schema:
    return {
        "name": "id",
        "in": "path",
        "required": True,
        "description": what,
        "schema": {"type": "string", "minLength": 1},
    }


SEGMENT: Schema = {"type": "string", "pattern": "^[a-z]{1,40}[.](html|js|css|svg)$"}
WORKER = [named("The worker's id: host:port and the path of its URL, percent-encoded.")]
SESSION = [named("The session's id: 32 hex digits.")]

SCHEMAS: dict[str, Schema] = {
    "Problem": objects(line=maybe(WHOLE), key=TEXT, message=TEXT),
    "Error": objects(
        error={
            **objects(message={"type": "string", "minLength": 1}, code=WHOLE),
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "code": {"type": "integer", "minimum": 400, "maximum": 599},
                "problems": many(ref("Problem")),
            },
        }
    ),
    "Health": objects(
        status={"const": "ok"},
        config={
            "type": "object",
            "required": ["generation", "reloaded_at", "last_reload_ok"],
            "properties": {
                "generation": {"type": "integer", "minimum": 0},
                "reloaded_at": maybe(NUMBER),
                "last_reload_ok": YES,
                "last_error": maybe(many(ref("Problem"))),
                "needs_restart": many(TEXT),
            },
        },
    ),
    "Readiness": {
        "type": "object",
        "required": ["ready"],
        "properties": {"ready": YES, "reason": TEXT, "models": many(TEXT)},
    },
    "Target": objects(
        name=TEXT,
        rank=WHOLE,
        running=WHOLE,
        wait_seconds=NUMBER,
        homes=WHOLE,
        share=NUMBER,
        breaker=TEXT,
        holding_pages=WHOLE,
        capacity_pages=maybe(WHOLE),
        evicted_pages=WHOLE,
        belief=objects(rung=TEXT, reason=TEXT, events=YES, whole=YES, batches=WHOLE, cache_share=NUMBER),
        returns=maybe(TEXT),
        queue=maybe(WHOLE),
        kv_usage=maybe(NUMBER),
    ),
    "Worker": objects(
        id=TEXT,
        url=TEXT,
        state={"enum": ["joining", "ready", "draining", "down"]},
        reason=TEXT,
        source=TEXT,
        lease=maybe(objects(seconds=NUMBER, left=NUMBER)),
        engine=TEXT,
        version=maybe(TEXT),
        role={"enum": ["unified", "prefill", "decode"]},
        protocol=maybe(TEXT),
        pool=maybe(TEXT),
        models=many(TEXT),
        block_size=maybe(WHOLE),
        kv_tokens=maybe(WHOLE),
        context_length=maybe(WHOLE),
        running=WHOLE,
        drain=maybe(
            objects(
                sessions=WHOLE,
                moved=WHOLE,
                ended=WHOLE,
                left=WHOLE,
                running=WHOLE,
                seconds=NUMBER,
                done=YES,
                stuck=maybe(TEXT),
            )
        ),
        connections=WHOLE,
        idle_connections=WHOLE,
        targets=many(ref("Target")),
        lacks=many(objects(what=TEXT, costs=TEXT, cure=TEXT)),
    ),
    "SessionRow": objects(
        id=TEXT,
        source=TEXT,
        tenant=TEXT,
        model=TEXT,
        home=maybe(TEXT),
        turns=WHOLE,
        running=WHOLE,
        prompt_tokens=maybe(WHOLE),
        idle_seconds=NUMBER,
    ),
    "Session": {
        "allOf": [
            ref("SessionRow"),
            objects(
                why=maybe(TEXT),
                partner=maybe(TEXT),
                parent=maybe(TEXT),
                children=many(TEXT),
                children_total=WHOLE,
                told=many(TEXT),
                tool=maybe(TEXT),
                holdings=each(WHOLE),
                hits=many(objects(prompt_tokens=WHOLE, cached_tokens=maybe(WHOLE), rate=maybe(NUMBER))),
                hit_rate=maybe(NUMBER),
                breaks=maybe({"type": "array"}),
                returns=maybe({"type": "object"}),
            ),
        ]
    },
    "Findings": objects(
        findings=many(
            objects(
                tenant=TEXT,
                model=TEXT,
                cause=TEXT,
                place={"type": "object"},
                breaks=WHOLE,
                tokens_lost=WHOLE,
                text=TEXT,
            )
        ),
        examined=WHOLE,
        skipped=WHOLE,
        skipped_by=each(WHOLE),
        breaks=objects(examined=WHOLE, skipped=WHOLE),
        waiting=WHOLE,
        share=NUMBER,
        tenants={"type": "object"},
    ),
    "Route": objects(
        decision=TEXT,
        reason=TEXT,
        target=TEXT,
        pair=maybe(objects(prefill=TEXT, decode=TEXT, kv_from=maybe(TEXT))),
        model=TEXT,
        prompt_tokens=maybe(WHOLE),
        mode={"enum": ["text", "ids", None]},
        best_tokens=maybe(WHOLE),
        seen_tokens=maybe(WHOLE),
        session=maybe(
            objects(
                id=TEXT,
                source=TEXT,
                home=maybe(TEXT),
                why=maybe(TEXT),
                partner=maybe(TEXT),
                turns=WHOLE,
                running=WHOLE,
                idle_seconds=maybe(NUMBER),
                returns=maybe({"type": "object"}),
                breaks=maybe({"type": "array"}),
            )
        ),
        candidates=many(
            objects(
                target=TEXT,
                total_ms=maybe(NUMBER),
                terms=maybe(each(NUMBER)),
                holding_tokens=each(WHOLE),
                running=WHOLE,
                homes=WHOLE,
                rung=TEXT,
                rung_reason=TEXT,
            )
        ),
    ),
    "Prefix": objects(
        id=TEXT,
        model=TEXT,
        tenant=maybe(TEXT),
        apart=YES,
        tokens=WHOLE,
        adds_tokens=WHOLE,
        prompts=WHOLE,
        prompts_complete=YES,
        used_seconds_ago=NUMBER,
        holders=many(TEXT),
        holders_total=WHOLE,
        children=many(ref("Prefix")),
    ),
    "Tenant": objects(
        name=TEXT,
        policy=maybe(TEXT),
        policies=each(maybe(TEXT)),
        priority=TEXT,
        weight=NUMBER,
        isolation={"enum": ["shared", "isolated"]},
        models=maybe(many(TEXT)),
        aliases=each(TEXT),
        canonical=many(TEXT),
        limits=each(objects(granted=NUMBER, used=NUMBER)),
        running=WHOLE,
        queued=WHOLE,
    ),
    "NewWorker": {
        "type": "object",
        "required": ["url"],
        "additionalProperties": False,
        "properties": {
            "url": {"type": "string", "pattern": "^https?://[A-Za-z0-9.-]+:[0-9]{1,4}$"},
            "engine": {"enum": ["vllm", "sglang", "tensorrt_llm", "llamacpp", "generic", None]},
            "role": {"enum": ["unified", "prefill", "decode", None]},
            "models": maybe(many(TEXT)),
            "pool": maybe(TEXT),
            "api_key": maybe({"type": "string", "pattern": "^[!-~]{1,200}$"}),
            "kv_tokens": maybe({"type": "integer", "minimum": 1}),
            "lease": {
                **maybe({"type": "number", "minimum": SHORTEST, "maximum": LONGEST}),
                "description": "Seconds within which it is heard of again, or is forgotten; null: no matter.",
            },
        },
    },
}

PATHS: dict[str, Schema] = {
    "/": {
        "get": operation(
            "The page: the fleet, live.",
            {"description": "HTML.", "content": {"text/html": {"schema": TEXT}}},
            security=[],
        ),
    },
    "/ui/{name}": {
        "parameters": [
            {"name": "name", "in": "path", "required": True, "description": "A file of the page.", "schema": SEGMENT}
        ],
        "get": operation(
            "What the page is made of.",
            {
                "description": "It.",
                "content": {kind: {"schema": TEXT} for kind in KINDS.values()},
            },
            404,
            security=[],
        ),
    },
    "/live": {
        "get": operation(
            "What the fleet does, as server-sent events, about one a second; the first has all tiles, others what changed.",
            {
                "description": "Each event's data is a JSON object; its keys may become more.",
                "content": {"text/event-stream": {}},
            },
            503,
            parameters=[
                query(
                    "events",
                    "How many; without it, until one side ends.",
                    {"type": "integer", "minimum": 1, "maximum": MOST_EVENTS},
                )
            ],
        )
    },
    "/healthz": {
        "get": operation("The process lives; how its configuration is.", _json("It does.", ref("Health")), security=[]),
    },
    "/readyz": {
        "get": {
            **operation("Whether it can serve.", _json("It can.", ref("Readiness")), security=[]),
        },
    },
    "/metrics": {
        "get": operation(
            "Prometheus exposition.", {"description": "All metrics.", "content": {"text/plain": {"schema": TEXT}}}
        )
    },
    "/openapi.json": {"get": operation("This document.", _json("OpenAPI 3.1.", {"type": "object"}))},
    "/workers": {
        "get": operation(
            "All workers: what they are, lack and do.", _json("All of them.", objects(workers=many(ref("Worker"))))
        ),
        "post": operation(
            "Add a worker; it joins when it answers. The same again is no other worker, and begins its lease anew.",
            _json("It was there.", ref("Worker")),
            408,
            requestBody=body(ref("NewWorker")),
        ),
    },
    "/workers/{id}": {
        "parameters": WORKER,
        "get": operation("One worker.", _json("It.", ref("Worker")), 404),
        "patch": operation(
            "Have it take requests, or drain.",
            _json("As it is now.", ref("Worker")),
            404,
            408,
            requestBody=body(
                {**objects(state={"enum": ["ready", "draining"]}), "additionalProperties": False},
            ),
        ),
        "delete": operation(
            "Forget it; what it still answers is relayed to its end.",
            _json("It is gone.", objects(removed=TEXT, running=WHOLE)),
            404,
        ),
    },
    "/workers/{id}/heartbeat": {
        "parameters": WORKER,
        "post": operation("It lives: its lease begins anew.", _json("As it is now.", ref("Worker")), 404),
    },
    "/workers/{id}/drain": {
        "parameters": WORKER,
        "post": operation(
            "Send it nothing new and give its sessions other homes.",
            _json("It drains.", ref("Worker")),
            404,
            status=202,
            parameters=[
                query(
                    "over",
                    "Seconds over which its sessions are moved.",
                    {"type": "string", "pattern": "^[0-9]{1,5}([.][0-9]{1,3})?$", "default": "0"},
                )
            ],
        ),
    },
    "/sessions": {
        "get": operation(
            "The sessions that were used last.",
            _json("Some of all.", objects(total=WHOLE, sessions=many(ref("SessionRow")))),
            parameters=[
                query("limit", "How many.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})
            ],
        )
    },
    "/sessions/{id}": {
        "parameters": SESSION,
        "get": operation(
            "One session: home and why, holdings, hits, breaks, family.", _json("It.", ref("Session")), 404
        ),
        "delete": operation("Forget it.", _json("It is gone.", objects(removed=TEXT)), 404),
    },
    "/sessions/{id}/move": {
        "parameters": SESSION,
        "post": operation(
            "Give it another home: the target or worker that is named, or whom its policy prefers.",
            _json("As it is now.", ref("Session")),
            404,
            408,
            503,
            requestBody=body(
                {"type": "object", "additionalProperties": False, "properties": {"to": TEXT}},
                required=False,
            ),
        ),
    },
    "/prefixes": {
        "get": operation(
            "The hottest prefixes that prompts share, as a tree, with who holds them; no text of them.",
            _json(
                "As it was some seconds ago at most.",
                objects(prefixes=many(ref("Prefix")), looked_at=WHOLE, complete=YES, age_seconds=NUMBER),
            ),
        )
    },
    "/tenants": {
        "get": operation(
            "All tenants: what they are granted and what they use of it; no keys.",
            _json("By name.", objects(tenants=many(ref("Tenant")))),
        )
    },
    "/doctor": {
        "get": operation(
            "Why prompts are not found in caches, the costliest first.", _json("Findings.", ref("Findings")), 404
        )
    },
    "/route": {
        "post": operation(
            "Where this request would go, and why; changes nothing.",
            _json("Every candidate with its cost.", ref("Route")),
            404,
            408,
            503,
            parameters=[
                query("path", "The path that the request is for.", {**TEXT, "default": "/v1/chat/completions"})
            ],
            requestBody=body({"type": "object"}),
        )
    },
    "/config": {
        "get": operation("The configuration in force, secrets hidden.", _json("All of it.", {"type": "object"}))
    },
    "/config/fingerprints": {
        "get": operation(
            "By what another configuration's secrets are compared with those in force.",
            _json("16 bits of a salted hash of each.", objects(salt=TEXT, fingerprints=each(TEXT))),
        )
    },
    "/config/reload": {
        "post": operation(
            "Read the configuration's file again and follow it, all or nothing.",
            _json(
                "What changed, and what takes a restart.",
                objects(
                    outcome={"enum": ["applied", "unchanged"]},
                    changed=many(TEXT),
                    needs_restart=many(TEXT),
                    generation=WHOLE,
                ),
            ),
            409,
        )
    },
}
PATHS["/readyz"]["get"]["responses"]["503"] = _json("Not now.", ref("Readiness"))
PATHS["/workers"]["post"]["responses"]["201"] = _json("It was added.", ref("Worker"))

DOCUMENT: Schema = {
    "openapi": "3.1.0",
    "info": {
        "title": "Warmroute control plane",
        "version": "1",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        "description": "Everything but /healthz, /readyz and the page's files needs the admin token, if one is configured.",
    },
    "paths": PATHS,
    "components": {
        "schemas": SCHEMAS,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    },
    "security": [{}, {"token": []}],
}
