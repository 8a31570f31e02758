"""One screen of ``warmroute top``: what the fleet does, in as many lines and columns as there are.

What matters most stands first: whether all is well, where the prompts' tokens were found and lost, requests, times, queue, and
then the targets, those first that somebody should look at. Targets that do not fit are counted; tenants have the room that is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from gateway.console.feed import Busy, Event, Tile
from gateway.console.looks import NOTHING, STYLES, amount, count, duration, percent, pick, plain, sentence, size

LINES = 3
"""Of the verdict."""
LEAST = 12
"""Cells of a name."""
LEVELS = {"ok": "green", "warn": "yellow", "bad": "red"}
SEGMENTS = (("found", "#", "green"), ("routing", "r", "magenta"), ("eviction", "e", "yellow"), ("cold", ".", "dim"))
"""Of the bar: what became of the prompts' tokens."""


@dataclass
class Seen:
    """What the feed told so far."""

    url: str
    event: Event | None = None
    """The last."""
    tiles: dict[str, Tile] = field(default_factory=dict)
    lost: str | None = None
    """Why there is no news; ``None``: there is."""

    def take(self, event: Event) -> None:
        """One more event."""
        if event.fleet.whole:
            self.tiles.clear()
        for name in event.fleet.gone:
            self.tiles.pop(name, None)
        self.tiles.update((tile.name, tile) for tile in event.fleet.tiles)
        self.event, self.lost = event, None


class Cell(NamedTuple):
    """A column of fixed width."""

    head: str
    width: int
    text: Callable[[Tile], str]
    style: Callable[[Tile], str] = lambda tile: ""


def screen(seen: Seen, width: int, height: int) -> Text:
    """At most ``height`` lines of at most ``width`` cells."""
    event = seen.event
    if event is None:
        return _cut([_head(seen, width)], width)
    lines = [_head(seen, width), *_verdict(event), *_hits(event, width), *_traffic(event), Text()]
    lines += _fleet(seen, width, height - len(lines))
    lines += _tenants(event, width, height - len(lines))
    return _cut(lines[:height], width)


def _cut(lines: Sequence[Text], width: int) -> Text:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _head(seen: Seen, width: int) -> Text:
    event = seen.event
    left = Text.assemble(("warmroute", "bold"), f"  {plain(seen.url)}")
    if seen.lost is not None:
        since = "" if event is None else f"; as of {_clock(event.time)}"
        return Text.assemble((f"{sentence(seen.lost)}{since}", "bold red"), "  ", left)
    if event is None:
        return Text.assemble(left, "  connecting")
    right = f"{_clock(event.time)}  configuration {event.config.generation}"
    return Text.assemble(left, " " * max(2, width - left.cell_len - len(right)), right)


def _clock(seconds: float) -> str:
    try:
        return strftime("%H:%M:%S", localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return NOTHING


def _verdict(event: Event) -> list[Text]:
    style = LEVELS.get(event.verdict.level, "")
    if not event.verdict.lines:
        return [Text("all is well", style)]
    return [Text(f"! {sentence(line.text)}", LEVELS.get(line.level, "")) for line in event.verdict.lines[:LINES]]


# -- where tokens were found --------------------------------------------------------------------------------------------


def _losses(event: Event) -> tuple[float | None, float | None, float | None]:
    """Shares of the prompts' tokens that were lost to routing, to eviction, and that nobody ever had."""
    hits = event.hits
    if hits.predicted is None or hits.best is None or hits.ceiling is None:
        return None, None, None
    return hits.best - hits.predicted, hits.ceiling - hits.best, 1 - hits.ceiling


def _hits(event: Event, width: int) -> list[Text]:
    hits = event.hits
    routing, eviction, cold = _losses(event)
    found = Text.assemble(
        ("cached  ", "bold"),
        (percent(hits.rate), "bold"),
        f" of {amount(hits.prompt_tokens)} prompt tokens; predicted {percent(hits.predicted)}, at most {percent(hits.ceiling)}",
    )
    lost = Text(
        f"lost    to routing {percent(routing)}, to eviction {percent(eviction)}; never seen before {percent(cold)}"
    )
    return [found, lost, *_bar(event, width)]


def _bar(event: Event, width: int) -> list[Text]:
    """The same as a picture: found, then lost to routing, to eviction, cold."""
    routing, eviction, cold = _losses(event)
    if routing is None or eviction is None or cold is None:
        return []
    room = max(10, width - 2)
    ends = [max(0.0, 1 - routing - eviction - cold), 1 - eviction - cold, 1 - cold, 1.0]
    at, parts = 0, []
    for (_, mark, style), end in zip(SEGMENTS, ends, strict=True):
        to = max(at, min(room, round(end * room)))
        parts.append((mark * (to - at), style))
        at = to
    return [Text.assemble("[", *parts, "]")]


# -- what it does -------------------------------------------------------------------------------------------------------


def _rate(number: float, seconds: float) -> str:
    if not seconds:
        return NOTHING
    rate = number / seconds
    return f"{rate:.1f}/s" if rate < 99.95 else f"{amount(rate)}/s"


def _traffic(event: Event) -> list[Text]:
    seconds, requests, first, queue = event.window_seconds, event.requests, event.ttft.all, event.queue
    refused = sum(tenant.refused for tenant in event.tenants)
    failed = _rate(requests.failed, seconds)
    times = NOTHING, NOTHING
    if first is not None:
        times = duration(first.p50 / 1e3), duration(first.p99 / 1e3)
    pressure = event.pressure
    return [
        Text.assemble(
            ("asked   ", "bold"),
            f"{_rate(requests.window, seconds)} ended, ",
            (f"{failed} failed", "red" if requests.failed else ""),
            f", {_rate(refused, seconds)} refused; {count(requests.running)} running; of the last {duration(seconds)}",
        ),
        Text.assemble(
            ("first   ", "bold"),
            f"token p50 {times[0]}, p99 {times[1]}; sessions {count(event.sessions.total)}",
        ),
        Text.assemble(
            ("queue   ", "bold"),
            (f"{count(queue.waiting)} waiting", "yellow" if queue.waiting else ""),
            f" ({size(queue.bytes)}), {count(queue.preparing)} preparing; pressure ",
            (plain(pressure.rung), "" if pressure.rung == "none" else "red"),
            f", loop {duration(pressure.lag_ms / 1e3)} late, {size(pressure.memory_bytes)}",
        ),
    ]


# -- targets ------------------------------------------------------------------------------------------------------------

_STATES = ("down", "joining", "draining")
_CELLS = (
    Cell("state", 8, lambda tile: tile.state, lambda tile: STYLES.get(tile.state, "")),
    Cell("flight", 6, lambda tile: count(tile.running)),
    Cell("queue", 5, lambda tile: count(tile.queue), lambda tile: "yellow" if tile.queue else ""),
    Cell("wait", 6, lambda tile: NOTHING if tile.wait_ms is None else duration(tile.wait_ms / 1e3)),
    Cell("kv use", 7, lambda tile: percent(tile.kv_usage)),
    Cell("homes", 5, lambda tile: count(tile.homes)),
    Cell("belief", 9, lambda tile: tile.rung or NOTHING, lambda tile: STYLES.get(tile.rung or "", "")),
)
_LEFT = frozenset(("state", "belief"))


def _badness(tile: Tile) -> tuple[int, float, int, str]:
    """The worst first: what serves nobody, what is left alone, what is not believed, what is too small; then by its wait."""
    if tile.state in _STATES:
        worst = _STATES.index(tile.state)
    elif tile.breaker_reason or tile.breaker not in (None, "closed"):
        worst = 3
    elif tile.rung in ("none", "session"):
        worst = 4
    else:
        worst = 5 if tile.crowded else 6
    return worst, -(tile.wait_ms or 0.0), -tile.running, tile.name


def _trouble(tile: Tile) -> str:
    """What is wrong with it."""
    if tile.state != "ready":
        return tile.reason
    if tile.breaker_reason or tile.breaker not in (None, "closed"):
        return f"breaker {tile.breaker}: {tile.breaker_reason or 'failed'}"
    if tile.rung in ("none", "session"):
        return tile.rung_reason
    return tile.crowded or ""


def _fleet(seen: Seen, width: int, room: int) -> list[Text]:
    tiles = sorted(seen.tiles.values(), key=_badness)
    if not tiles:
        return [Text("no workers")]
    longest = max(cell_len(plain(tile.name)) for tile in tiles)
    fixed = sum(cell.width + 1 for cell in _CELLS)
    name = max(LEAST, min(longest, width - fixed))
    head = Text(f"{'target':{name}} " + " ".join(_placed(cell, cell.head) for cell in _CELLS), "bold reverse")
    head.append(" " * max(0, width - head.cell_len))
    # The last line tells how many there are besides.
    shown = tiles if len(tiles) < room else tiles[: max(0, room - 2)]
    rows = [head, *(_row(tile, name) for tile in shown)]
    if len(shown) < len(tiles):
        rows.append(Text(f"... and {len(tiles) - len(shown):,} more of {len(tiles):,}", "dim"))
    return rows


def _placed(cell: Cell, text: str) -> str:
    short = pick(text, cell.width)
    return f"{short:<{cell.width}}" if cell.head in _LEFT else f"{short:>{cell.width}}"


def _row(tile: Tile, width: int) -> Text:
    name = Text(pick(plain(tile.name), width))
    name.append(" " * max(0, width - name.cell_len))
    parts = [(f" {_placed(cell, plain(cell.text(tile)))}", cell.style(tile)) for cell in _CELLS]
    row = Text.assemble(name, *parts)
    trouble = _trouble(tile)
    if trouble:
        row.append(f"  {sentence(trouble)}", "yellow")
    return row


def _tenants(event: Event, width: int, room: int) -> list[Text]:
    busy = [tenant for tenant in event.tenants if tenant.requests or tenant.running or tenant.queued or tenant.refused]
    if room < 3 or not busy:
        return []
    lines = [
        Text(),
        Text(f"{'tenant':24} {'asked':>9} {'failed':>9} {'refused':>9} {'running':>8} {'waiting':>8}", "bold"),
    ]
    lines += [_tenant(tenant, event.window_seconds) for tenant in busy[: room - 2]]
    return lines


def _tenant(tenant: Busy, seconds: float) -> Text:
    name = Text(pick(plain(tenant.name), 24))
    name.append(" " * max(0, 24 - name.cell_len))
    counts = (tenant.requests, tenant.failed, tenant.refused)
    rates = " ".join(f"{_rate(each, seconds):>9}" for each in counts)
    return Text.assemble(name, f" {rates} {count(tenant.running):>8} {count(tenant.queued):>8}")
