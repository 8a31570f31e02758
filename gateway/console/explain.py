"""``warmroute explain``: where a request would go, and why, in words and numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from gateway.console.answers import Break, Candidate, Route, Story
from gateway.console.client import Admin, Unanswered, header
from gateway.console.looks import (
    Column,
    amount,
    console,
    count,
    duration,
    milliseconds,
    number,
    percent,
    raw,
    said,
    say,
    sentence,
    state,
    table,
)
from gateway.findings import WHAT

LARGEST = 64 * 1024 * 1024
"""Bytes of a request that a gateway looks at."""
TIE = 0.05
"""Milliseconds that are not told apart."""
BREAKS = 3
"""That are told."""
CONNECTIONS = frozenset(
    ("host", "content-length", "content-encoding", "transfer-encoding", "connection", "expect", "accept-encoding")
)
"""Headers of the connection and of the body's form, which say nothing of a route."""
REASONS = {
    "home": "its session is at home there, and nobody else is sooner by enough to move it",
    "prefix": "it holds some of the prompt, and begins to answer soonest",
    "load": "it begins to answer soonest, though it holds nothing of the prompt",
    "moved": "its session's home would be so much later that the session moves",
    "spill": "its session's home would be too late for this one; the session stays at home where it is",
    "home_gone": "its session's home is gone, or cannot be used now",
    "new": "its session is new, and is placed there",
    "pinned": "what it goes on from is there, and nowhere else",
    "turn": "it is its turn",
    "draw": "by lot",
    "least": "it has least to do",
    "less_of_two": "of two that were drawn, it has less to do",
    "only": "nobody else can take it",
    "hash": "that is where the hash leads",
    "overflow": "where the hash leads, more than its share is under way",
    "saturated": "who holds the prompt's start is too busy",
}
"""Of choices, in words; a policy of somebody else's may have others."""
RUNGS = {
    "exact": "its own events tell what it holds",
    "predicted": "what was sent there is taken to be there, until its cache is full",
    "session": "only what a session left at its home is taken to be there",
    "none": "nothing is taken to be there",
}
WHY = {
    "start": "nothing has spoken for more, or for less, since it joined",
    "events": "events tell all that it holds",
    "no_events": "it computes, and its events do not tell of it",
    "finds_nothing": "its answers found nothing where much was believed",
    "finds_something": "its answers find again what is believed",
    "reports_disagree": "its answers report other cached tokens than its events tell",
    "reports_agree": "its answers agree with its events",
    "shares_nothing": "its answers do not find what other sessions sent there",
    "shares_again": "its answers find again what other sessions sent there",
    "disconnected": "the connection for events was lost",
    "flooded": "events came faster than they could be read",
    "unread": "some of its events could not be read",
    "index_full": "there was no room for what its events tell",
    "missed": "events were missed, and could not be had again",
    "gap": "events were missed, and could not be had again",
    "restarted": "it started anew",
    "not_subscribed": "nobody listens to its events",
}
"""Why a target is on its rung, in words."""
CAUSES = {cause.value: text for cause, text in WHAT.items()}


def run(admin: Admin, file: str, path: str, headers: Sequence[str], key: str | None, as_json: bool, limit: int) -> None:
    """Ask, and print for people, or with ``as_json`` the answer as it came. Raises `Unanswered`, `Refused`."""
    sent = {name: value for name, value in map(_header, headers) if name.decode() not in CONNECTIONS}
    if key is not None:
        sent[b"x-warmroute-tenant-key"] = header("--key", key)
    body = _request(file)
    told = admin.route(path, body, {b"content-type": b"application/json", **sent})
    route = admin.read(told, Route)
    if as_json:
        raw(told)
    else:
        show(console(), route, limit)


def _header(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    name = name.strip().lower()
    if not colon or not name or not name.isascii() or any(each <= " " or each in '"(),/;<=>?@[]{}\\' for each in name):
        raise Unanswered(f"--header needs NAME: VALUE, like 'x-session-id: mine', not {text!r}")
    if name == "authorization":
        raise Unanswered(
            "--header authorization would take the place of the admin token: give a tenant's key with --key"
        )
    return name.encode(), header(f"--header {name}", value)


def _request(file: str) -> bytes:
    name = "standard input" if file == "-" else file
    try:
        if file == "-":
            body = sys.stdin.buffer.read(LARGEST + 1)
        else:
            with open(file, "rb") as opened:
                body = opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise Unanswered(f"{name} cannot be read: {error}") from None
    if len(body) > LARGEST:
        raise Unanswered(f"{name} is over {LARGEST >> 20} MiB, more than a gateway looks at: give a smaller request")
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise Unanswered(
            f"{name} is no JSON object ({error}): give the body of a request as a client would send it"
        ) from None
    return body


# -- for people ---------------------------------------------------------------------------------------------------------


def show(out: Console, route: Route, limit: int) -> None:
    """All of it."""
    rows = sorted(route.candidates, key=_cost)
    for parts in (*_decision(route, rows), *_held(route, rows)):
        say(out, *parts)
    out.print()
    _candidates(out, route, rows, limit)
    out.print()
    for parts in (*_beliefs(route, rows), *_session(route.session)):
        say(out, *parts)


def _cost(row: Candidate) -> float:
    return float("inf") if row.total_ms is None else row.total_ms


def _bold(name: str) -> Text:
    return said(name, "bold")


def _chosen(route: Route) -> Candidate | None:
    prefill = None if route.pair is None else route.pair.prefill
    mine = [row for row in route.candidates if row.target == route.target]
    return next((row for row in mine if row.prefill == prefill), mine[0] if mine else None)


def _decision(route: Route, rows: Sequence[Candidate]) -> Iterator[tuple[str | Text, ...]]:
    why = f"{REASONS[route.reason]} (" if route.reason in REASONS else "the policy's reason is ("
    code = said(f"{route.decision}/{route.reason}")
    if route.pair is None:
        yield "It would go to ", _bold(route.target), f": {why}", code, ")."
    else:
        lent = () if route.pair.kv_from is None else (", which fetches KV from ", _bold(route.pair.kv_from))
        first, second = _bold(route.pair.prefill), _bold(route.pair.decode)
        yield "Its prompt would go to ", first, *lent, " and its answer come from ", second, f": {why}", code, ")."
    chosen = _chosen(route)
    if chosen is not None and chosen.total_ms is not None:
        yield from _against(chosen, chosen.total_ms, rows)
    other = route.shadow
    if other is not None:
        agrees = (
            "agrees." if other.agrees else f"would save {milliseconds(other.saves_ms)} ms of this one's cost there."
        )
        yield "The policy that is asked beside, ", said(other.policy), ", takes ", said(other.target), f" and {agrees}"


def _against(chosen: Candidate, cost: float, rows: Sequence[Candidate]) -> Iterator[tuple[str | Text, ...]]:
    """The choice beside the best of all others."""
    others = [row for row in rows if row is not chosen and row.total_ms is not None]
    if not others:
        return
    best = others[0]
    less, head = _cost(best) - cost, f"That costs {milliseconds(cost)} ms"
    other = (
        (said(best.target),) if best.prefill is None else (said(best.target), " with prompts at ", said(best.prefill))
    )
    if abs(less) < TIE:
        yield f"{head}, which ", *other, " would cost too."
    elif less > 0:
        yield f"{head}, {milliseconds(less)} ms less than the next, ", *other, "."
    else:
        yield f"{head}; ", *other, f" would cost {milliseconds(-less)} ms less, by this estimate."


def _held(route: Route, rows: Sequence[Candidate]) -> Iterator[tuple[str | Text, ...]]:
    tokens = route.prompt_tokens
    how = "" if tokens is None else f", about {number(tokens, 'prompt token')}" if route.mode == "text" else ""
    exact = f", {number(tokens, 'prompt token')}" if tokens is not None and not how else ""
    head: tuple[str | Text, ...] = ("Model ", said(route.model), f"{how}{exact}. ")
    if route.seen_tokens is None or route.best_tokens is None or not tokens:
        yield (*head, "What targets hold of it was not asked: the policy does not need it.")
        return
    best = max(rows, key=lambda row: row.holds, default=None)
    seen = f"Seen before: {count(route.seen_tokens)} ({percent(route.seen_tokens / tokens)}); held by "
    most = f": {count(route.best_tokens)} ({percent(route.best_tokens / tokens)})."
    if not route.best_tokens:
        yield (*head, seen, "nobody.")
    elif best is None or best.holds < route.best_tokens:
        yield (*head, seen, "another", most)
    else:
        yield (*head, seen, said(best.computes), most)


def _candidates(out: Console, route: Route, rows: Sequence[Candidate], limit: int) -> None:
    chosen = _chosen(route)
    shown = list(rows[:limit])
    if shown and chosen is not None and not any(row is chosen for row in shown):
        shown[-1] = chosen
    used = [name for row in shown for name, value in (row.terms or {}).items() if abs(value) >= TIE]
    columns: list[Column[Candidate]] = [
        Column("", lambda row: "->" if row is chosen else ""),
        Column("candidate", lambda row: said(row.target, "bold" if row is chosen else "")),
    ]
    if route.pair is not None or any(row.prefill for row in rows):
        columns.append(Column("prompt by", lambda row: said(row.computes)))
    columns.append(Column("total ms", lambda row: milliseconds(row.total_ms), right=True))
    columns += [_term(name) for name in dict.fromkeys(used)]
    columns.append(Column("holds", _holds, right=True))
    columns.append(Column("belief", lambda row: state(row.belief[0])))
    columns.append(Column("in flight", lambda row: count(row.running), right=True, spare=True))
    columns.append(Column("homes", lambda row: count(row.homes), right=True, spare=True))
    table(out, columns, shown)
    if len(shown) < len(rows):
        out.print(f"... and {len(rows) - len(shown):,} more (--limit)")


def _term(name: str) -> Column[Candidate]:
    return Column(
        sentence(name.replace("_", " ")),
        lambda row: milliseconds(None if row.terms is None else row.terms.get(name)),
        True,
    )


def _holds(row: Candidate) -> str:
    """Tokens, and where they are if that is not in the engine's first memory."""
    tiers = row.prefill_holding_tokens or row.holding_tokens
    away = [f"{amount(tokens)} {tier}" for tier, tokens in tiers.items() if tier != "device" and tokens]
    return count(row.holds) + (f" ({', '.join(away)})" if away else "")


def _beliefs(route: Route, rows: Sequence[Candidate]) -> Iterator[tuple[str | Text, ...]]:
    """What the candidates' rungs mean, each once."""
    if route.mode is None:
        return
    met: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        met.setdefault(row.belief, set()).add(row.computes)
    for (rung, reason), names in met.items():
        who = said(next(iter(names))) if len(names) == 1 else f"{len(names):,} targets"
        meaning = f"{RUNGS[rung]}; " if rung in RUNGS else ""
        yield "Belief ", state(rung), " (", who, f"): {meaning}", WHY.get(reason) or said(reason), "."
    if route.mode == "text" and any(row.belief[0] == "exact" for row in rows):
        yield ("This prompt is routed by its text, which events cannot be compared with: holdings are predicted.",)


def _session(story: Story | None) -> Iterator[tuple[str | Text, ...]]:
    if story is None:
        yield ("It belongs to no session.",)
        return
    named = ("Session ", said(story.id), " (found by ", said(story.source or "its content"), ")")
    if not story.turns and story.home is None:
        yield (*named, ": it is new.")
        return
    runs = f", {count(story.running)} running" if story.running else ""
    idle = "" if story.idle_seconds is None else f", last used {duration(story.idle_seconds)} ago"
    yield (*named, f": {number(story.turns, 'turn')}{runs}{idle}.")
    if story.home is None:
        yield ("It has no home.",)
    else:
        because: tuple[str | Text, ...] = () if story.why is None else (" (placed there by: ", said(story.why), ")")
        partner: tuple[str | Text, ...] = () if story.partner is None else (", its prompts at ", said(story.partner))
        yield ("Its home is ", said(story.home), *partner, *because, ".")
    if story.returns is not None:
        yield ("Its return: ", sentence(story.returns.says), ".")
    yield from breaks(story.breaks)


def breaks(found: Sequence[Break] | None) -> Iterator[tuple[str | Text, ...]]:
    """Where its prompts broke from those before."""
    if found is None:
        yield ("Whether its prompts break from those before is not known: the doctor is off.",)
    elif not found:
        yield ("The doctor found no break in it.",)
    for each in (found or ())[:BREAKS]:
        about = "about " if each.estimated else ""
        lost = f": {about}{number(each.tokens_lost, 'token')} lost."
        what = CAUSES.get(each.cause, each.cause.replace("_", " "))
        yield ("Its prompt broke at ", sentence(each.place.text), ": ", sentence(what), lost)
