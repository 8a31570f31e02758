"""``warmroute workers``, ``sessions``, ``tenants``: what the control plane lists, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.text import Text

from gateway.console.answers import (
    Hit,
    Limit,
    Session,
    SessionRow,
    Target,
    Tenant,
    Tenants,
    Worker,
    Workers,
)
from gateway.console.client import Admin
from gateway.console.explain import breaks
from gateway.console.looks import (
    NOTHING,
    Column,
    amount,
    console,
    count,
    duration,
    number,
    percent,
    raw,
    said,
    say,
    sentence,
    state,
    table,
)

MOST = 1000
"""Sessions that the control plane lists."""
ORDER = ("down", "joining", "draining", "ready")
"""States of workers, those first that somebody should look at."""
CHILDREN = 10
"""That are named."""
GRANTS = {
    "requests_per_minute": "requests/min",
    "prompt_tokens_per_minute": "prompt tokens/min",
    "computed_tokens_per_minute": "computed tokens/min",
    "concurrency": "at once",
}
"""Limits of tenants."""

Parts = tuple[str | Text, ...]
Fact = tuple[str, str | Text]
Line = tuple[Worker, Target | None]


class _Raw(msgspec.Struct):
    """``/sessions``, as it came."""

    total: int
    sessions: list[msgspec.Raw]


# -- workers ------------------------------------------------------------------------------------------------------------


def workers(admin: Admin, id_: str | None, as_json: bool) -> None:
    """All workers, or one in full. Raises `Unanswered`, `Refused`."""
    told = admin.get("/workers" if id_ is None else f"/workers/{quote(id_, safe='')}", named=id_ is not None)
    if id_ is not None:
        worker = admin.read(told, Worker)
        return raw(told) if as_json else _worker(console(), worker)
    rows = admin.read(told, Workers).workers
    return raw(told) if as_json else _workers(console(), rows)


def _workers(out: Console, rows: list[Worker]) -> None:
    if not rows:
        out.print("no workers: 'warmroute serve --worker URL' names them, or POST /workers on the admin port")
        return
    rows.sort(key=lambda row: (ORDER.index(row.state) if row.state in ORDER else -1, row.id))
    # A worker with ranks has a line for each; what is the worker's own stands on its first.
    lines: list[Line] = [(row, target) for row in rows for target in (row.targets or (None,))]
    columns: list[Column[Line]] = [
        Column("worker", lambda line: said(line[0].id if line[1] is None else line[1].name)),
        Column("state", lambda line: state(line[0].state)),
        Column("in flight", lambda line: count(_of(line, lambda target: target.running)), True),
        Column("queue", lambda line: count(_of(line, lambda target: target.queue)), True),
        Column("wait", lambda line: duration(_of(line, lambda target: target.wait_seconds)), True),
        Column("kv use", lambda line: percent(_of(line, lambda target: target.kv_usage)), True),
        Column("kv tokens", lambda line: amount(line[0].kv_tokens), True),
        Column("homes", lambda line: count(_of(line, lambda target: target.homes)), True),
        Column("belief", lambda line: NOTHING if line[1] is None else state(line[1].belief.rung)),
        Column("engine", lambda line: said(f"{line[0].engine} {line[0].version or ''}".strip()), spare=True),
        Column("role", lambda line: said(line[0].role), spare=True),
        Column("breaker", lambda line: said(None if line[1] is None else line[1].breaker), spare=True),
        Column("models", lambda line: said(", ".join(line[0].models) or None), spare=True),
    ]
    table(out, columns, lines)
    for row in rows:
        if row.state != "ready" and row.reason:
            say(out, said(row.id), f" {sentence(row.state)}: ", sentence(row.reason))


def _of(line: Line, read: Callable[[Target], float | None]) -> float | None:
    return None if line[1] is None else read(line[1])


def _worker(out: Console, worker: Worker) -> None:
    reason = f" ({sentence(worker.reason)})" if worker.reason else ""
    _facts(
        out,
        ("worker", said(worker.id)),
        ("url", said(worker.url)),
        ("state", Text.assemble(state(worker.state), reason)),
        ("engine", said(f"{worker.engine} {worker.version or ''}".strip())),
        ("role", said(worker.role)),
        ("protocol", said(worker.protocol)),
        ("pool", said(worker.pool)),
        ("models", said(", ".join(worker.models) or None)),
        ("kv cache", f"{count(worker.kv_tokens)} tokens" if worker.kv_tokens is not None else NOTHING),
        ("block size", count(worker.block_size)),
        ("context", f"{count(worker.context_length)} tokens" if worker.context_length is not None else NOTHING),
        ("in flight", count(worker.running)),
        ("connections", f"{count(worker.connections)}, {count(worker.idle_connections)} idle"),
    )
    for parts in _drain(worker):
        say(out, *parts)
    if worker.targets:
        out.print()
        table(out, _TARGET, worker.targets)
    for target in worker.targets:
        for what in (target.breaker_reason, target.returns):
            if what:
                say(out, said(target.name), ": ", sentence(what))
    for lack in worker.lacks:
        say(out, "\nmissing: ", sentence(lack.what))
        say(out, "  costs: ", sentence(lack.costs))
        say(out, "  cure:  ", sentence(lack.cure))


def _drain(worker: Worker) -> Iterator[Parts]:
    drain = worker.drain
    if drain is None:
        return
    done = "drained" if drain.done else "drains"
    yield (
        f"{done} since {duration(drain.seconds)}: of {number(drain.sessions, 'session')} {count(drain.moved)} moved, "
        f"{count(drain.ended)} ended, {count(drain.left)} left; {count(drain.running)} in flight",
    )
    if drain.stuck is not None:
        yield "stuck: ", sentence(drain.stuck)


_TARGET: Sequence[Column[Target]] = (
    Column("target", lambda target: said(target.name)),
    Column("in flight", lambda target: count(target.running), True),
    Column("queue", lambda target: count(target.queue), True),
    Column("wait", lambda target: duration(target.wait_seconds), True),
    Column("kv use", lambda target: percent(target.kv_usage), True),
    Column("homes", lambda target: count(target.homes), True),
    Column("pages held", lambda target: f"{amount(target.holding_pages)} of {amount(target.capacity_pages)}", True),
    Column("breaker", lambda target: said(target.breaker)),
    Column("belief", lambda target: state(target.belief.rung)),
    Column("why", lambda target: said(target.belief.reason), spare=True),
    Column("counted on", lambda target: percent(target.belief.cache_share), True, spare=True),
)


# -- sessions -----------------------------------------------------------------------------------------------------------


class Wanted(msgspec.Struct):
    """Which sessions."""

    tenant: str | None = None
    home: str | None = None
    search: str | None = None
    limit: int = 100

    @property
    def any(self) -> bool:
        """Whether all are."""
        return self.tenant is None and self.home is None and self.search is None

    def takes(self, row: SessionRow) -> bool:
        """Whether ``row`` is; a home is that of a target, or of any rank of a worker."""
        home = row.home or ""
        words = " ".join((row.id, row.tenant, row.model, home, row.source)).lower()
        return (
            (self.tenant is None or row.tenant == self.tenant)
            and (self.home is None or home == self.home or home.startswith(f"{self.home}#"))
            and (self.search is None or self.search.lower() in words)
        )


def sessions(admin: Admin, id_: str | None, wanted: Wanted, as_json: bool) -> None:
    """The sessions that were used last, or one in full. Raises `Unanswered`, `Refused`."""
    if id_ is not None:
        told = admin.get(f"/sessions/{quote(id_, safe='')}", named=True)
        session = admin.read(told, Session)
        return raw(told) if as_json else _session(console(), session)
    looked = min(wanted.limit, MOST) if wanted.any else MOST
    told = admin.get(f"/sessions?limit={looked}")
    found = admin.read(told, _Raw)
    rows = [(each, admin.read(bytes(each), SessionRow)) for each in found.sessions]
    kept = [(each, row) for each, row in rows if wanted.takes(row)][: wanted.limit]
    if not as_json:
        return _sessions(console(), [row for _, row in kept], found.total, len(rows), wanted)
    return raw(told if wanted.any else msgspec.json.encode(_Raw(found.total, [each for each, _ in kept])))


def _sessions(out: Console, rows: Sequence[SessionRow], total: int, looked: int, wanted: Wanted) -> None:
    if not rows:
        among = "" if looked == total else f" among the {looked:,} of {total:,} that were used last"
        out.print("no sessions" if wanted.any else f"no session is like that{among}")
        return
    columns: list[Column[SessionRow]] = [
        Column("session", lambda row: said(row.id)),
        Column("home", lambda row: said(row.home)),
        Column("turns", lambda row: count(row.turns), True),
        Column("running", lambda row: count(row.running), True),
        Column("prompt", lambda row: amount(row.prompt_tokens), True),
        Column("idle", lambda row: duration(row.idle_seconds), True),
        Column("tenant", lambda row: said(row.tenant)),
        Column("model", lambda row: said(row.model), spare=True),
        Column("found by", lambda row: said(row.source), spare=True),
    ]
    table(out, columns, rows)
    if len(rows) < total:
        among = "" if wanted.any or looked == total else f"; only the {looked:,} that were used last were looked at"
        out.print(f"{len(rows):,} of {number(total, 'session')}, the last used first{among}")


def _session(out: Console, session: Session) -> None:
    _facts(out, *_origin(session), *_state(session))
    if session.holdings:
        out.print()
        held: list[Column[tuple[str, int]]] = [
            Column("held at", lambda row: said(row[0])),
            Column("tokens", lambda row: count(row[1]), True),
        ]
        table(out, held, list(session.holdings.items()))
    if session.hits:
        say(out, "\nits last turns, of which so much was cached: ", ", ".join(map(_hit, session.hits)))
    out.print()
    if session.returns is not None:
        say(out, "Its return: ", sentence(session.returns.says), ".")
    for parts in breaks(session.breaks):
        say(out, *parts)


def _origin(session: Session) -> Iterator[Fact]:
    """Who it is."""
    children = ", ".join(session.children[:CHILDREN]) + (" ..." if session.children_total > CHILDREN else "")
    yield "session", said(session.id)
    yield "found by", said(session.source)
    yield "tenant", said(session.tenant)
    yield "model", said(session.model)
    yield "parent", said(session.parent)
    yield "children", f"{count(session.children_total)}: {sentence(children)}" if session.children else NOTHING


def _state(session: Session) -> Iterator[Fact]:
    """Where and how it is."""
    why = "" if session.why is None else f" (placed there by: {sentence(session.why)})"
    yield "home", Text.assemble(said(session.home), why)
    yield "prompts at", said(session.partner)
    yield (
        "turns",
        f"{count(session.turns)}, {count(session.running)} running, idle for {duration(session.idle_seconds)}",
    )
    yield "last prompt", NOTHING if session.prompt_tokens is None else number(session.prompt_tokens, "token")
    yield "last tool", said(session.tool)
    yield "told to", said(", ".join(session.told) or None)
    yield "hit rate", percent(session.hit_rate)


def _hit(hit: Hit) -> str:
    return f"{count(hit.cached_tokens)} of {count(hit.prompt_tokens)}"


# -- tenants ------------------------------------------------------------------------------------------------------------


def tenants(admin: Admin, as_json: bool) -> None:
    """All tenants. Raises `Unanswered`, `Refused`."""
    told = admin.get("/tenants")
    rows = admin.read(told, Tenants).tenants
    return raw(told) if as_json else _tenants(console(), rows)


def _tenants(out: Console, rows: list[Tenant]) -> None:
    if not rows:
        out.print("no tenants: everybody is one")
        return
    rows.sort(key=lambda row: (-(row.running + row.queued), row.name))
    columns: list[Column[Tenant]] = [
        Column("tenant", lambda row: said(row.name)),
        Column("in flight", lambda row: count(row.running), True),
        Column("waiting", lambda row: count(row.queued), True),
        Column("priority", lambda row: said(row.priority)),
        Column("weight", lambda row: f"{row.weight:g}", True),
        Column("policy", lambda row: said(row.policy or "the model's")),
    ]
    for name in dict.fromkeys(name for row in rows for name in row.limits):
        columns.append(_limit(name))
    columns.append(Column("isolation", lambda row: said(row.isolation), spare=True))
    columns.append(
        Column("models", lambda row: said(", ".join(row.models) if row.models is not None else "all"), spare=True)
    )
    table(out, columns, rows)


def _limit(name: str) -> Column[Tenant]:
    return Column(sentence(GRANTS.get(name, name.replace("_", " "))), lambda row: _used(row.limits.get(name)), True)


def _used(limit: Limit | None) -> str:
    return NOTHING if limit is None else f"{amount(limit.used)} of {amount(limit.granted)}"


# -- one thing in full --------------------------------------------------------------------------------------------------


def _facts(out: Console, *facts: Fact) -> None:
    wide = max(len(name) for name, _ in facts)
    for name, what in facts:
        say(out, Text(f"{name:{wide}}  ", "bold"), what)
