"""Gauges: what is read of the gateway when it is scraped."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from platform import python_version
from typing import TYPE_CHECKING

from gateway.fleet import FALL
from gateway.series import Gauge
from gateway.workers import State, Target
from kv_index.groups import Tier
from kv_index.index import Rung
from policies.admission import Level

if TYPE_CHECKING:
    from gateway.app import Gateway


def gauges(gateway: Gateway) -> list[Gauge]:
    """Every gauge of ``gateway``; targets and workers are those of the moment of the scrape."""
    return _of_targets(gateway) + _of_process(gateway) + _of_queue(gateway)


def _pool(target: Target) -> str:
    """The model that it serves first: those of one pool can stand in for each other."""
    models = target.worker.facts.models
    return models[0].name if models else ""


def _of_queue(gateway: Gateway) -> list[Gauge]:
    admission = gateway.admission

    def summed(read: Callable[[Level], float]) -> list[tuple[tuple[str, ...], float]]:
        names = [priority.name for priority in admission.options.priorities]
        queues = list(admission.queues.values())
        return [((name,), sum(read(queue.levels[place]) for queue in queues)) for place, name in enumerate(names)]

    return [
        Gauge(
            "warmroute_pressure_rung",
            "What the gateway leaves out for want of time or memory: 0 nothing, 1 optional work, 2 token ids, 3 prefixes, "
            "4 refuses all but the first priority, 5 refuses every new request.",
            lambda: [((), float(gateway.pressure.rung))],
        ),
        Gauge(
            "warmroute_event_loop_lag_average_seconds",
            "How late the event loop wakes, on average over a second.",
            lambda: [((), gateway.pressure.lag)],
        ),
        Gauge(
            "warmroute_queue_requests",
            "Requests that wait because everybody who could serve them is full, or their tenant has as many running as it may.",
            lambda: summed(lambda level: level.requests),
            ("priority",),
        ),
        Gauge(
            "warmroute_queue_bytes",
            "Bytes of the bodies of requests that wait.",
            lambda: summed(lambda level: level.bytes),
            ("priority",),
        ),
        Gauge(
            "warmroute_tenant_running",
            "Requests in flight of tenants that have limits.",
            lambda: [((name,), meter.running) for name, meter in gateway.meters.all()],
            ("tenant",),
        ),
    ]


def _of_targets(gateway: Gateway) -> list[Gauge]:
    index, targets = gateway.index, gateway.fleet.targets
    return [
        Gauge(
            "warmroute_target_in_flight",
            "Requests in flight that this gateway sent.",
            lambda: [((t.name,), t.running) for t in targets.values()],
            ("target",),
        ),
        Gauge(
            "warmroute_target_wait_seconds",
            "Estimated prefill work in front of a new request.",
            lambda: [((t.name, t.role.value, _pool(t)), t.waits(gateway.fleet.clock())) for t in targets.values()],
            ("target", "role", "pool"),
        ),
        Gauge(
            "warmroute_target_lateness",
            "How long streams take to begin on the target of late, as a multiple of what was expected of their prompts there; "
            "absent while there are too few.",
            lambda: [((t.name,), t.record.late / t.record.begun) for t in targets.values() if t.record.begun >= 1],
            ("target",),
        ),
        Gauge(
            "warmroute_target_breaker",
            "1 while the target's breaker is open, by why: faults in a row, or errors or latency far above its peers'.",
            lambda: [((t.name, t.breaker.reason), 1.0) for t in targets.values() if t.breaker.reason is not None],
            ("target", "reason"),
        ),
        Gauge(
            "warmroute_workers_doubted",
            "Workers that do not answer their probes and are used all the same, because most of their peers do not either.",
            lambda: [((), sum(w.state is State.READY and w.failures >= FALL for w in gateway.fleet.workers.values()))],
        ),
        Gauge(
            "warmroute_target_homes",
            "Live sessions at home on the target.",
            lambda: [((t.name,), t.homes) for t in targets.values()],
            ("target",),
        ),
        Gauge(
            "warmroute_target_holding_pages",
            "Pages that the target is believed to hold: 256 bytes of text, or 16 token ids.",
            lambda: [((t.name,), index.radix.pages(t.id)) for t in targets.values()],
            ("target",),
        ),
        Gauge(
            "warmroute_target_returning_tokens",
            "Tokens that come in until an ordinary session of the target returns; absent while that is not known.",
            lambda: [
                ((t.name,), gateway.routing.returning.needed(t, gateway.fleet.clock()))
                for t in targets.values()
                if t.gaps.known
            ],
            ("target",),
        ),
        Gauge(
            "warmroute_target_queue",
            "Requests that the engine reports waiting; absent while it does not say.",
            lambda: [
                ((t.name,), t.load_report.waiting)
                for t in targets.values()
                if t.load_report is not None and t.load_report.waiting is not None
            ],
            ("target",),
        ),
        Gauge(
            "warmroute_target_kv_usage",
            "The part of its KV cache that the engine reports in use by running requests; absent while it does not say.",
            lambda: [
                ((t.name,), t.load_report.kv_usage)
                for t in targets.values()
                if t.load_report is not None and t.load_report.kv_usage is not None
            ],
            ("target",),
        ),
        Gauge(
            "warmroute_target_evicted_pages",
            "Pages of the target's belief forgotten to respect its engine's capacity, since it joined.",
            lambda: [((t.name,), index.radix.evicted(t.id)) for t in targets.values()],
            ("target",),
        ),
        Gauge(
            "warmroute_target_belief",
            "1 for what the target's holdings are taken from: exact (its events), predicted, session, none.",
            lambda: [
                ((t.name, rung.value), float(index.of(t.id).rung is rung)) for t in targets.values() for rung in Rung
            ],
            ("target", "rung"),
        ),
        Gauge(
            "warmroute_target_held_tokens",
            "Tokens that the target holds, as its events tell; absent while it tells nothing.",
            lambda: [
                ((t.name, tier.name.lower()), index.blocks.tokens(t.id, tier))
                for t in targets.values()
                if t.id in index.blocks
                for tier in Tier
            ],
            ("target", "tier"),
        ),
        Gauge(
            "warmroute_target_cache_share",
            "The part of its cache's size that the target's answers let us count on.",
            lambda: [((t.name,), index.of(t.id).share) for t in targets.values()],
            ("target",),
        ),
    ]


def _of_process(gateway: Gateway) -> list[Gauge]:
    fleet, index = gateway.fleet, gateway.index
    running = version("warmroute"), python_version()
    return [
        Gauge(
            "warmroute_build_info",
            "1, with what runs.",
            lambda: [(running, 1.0)],
            ("version", "python"),
        ),
        Gauge(
            "warmroute_worker_state",
            "1 for the state that a worker is in.",
            lambda: [
                ((worker.id, state.value), float(worker.state is state))
                for worker in fleet.workers.values()
                for state in State
            ],
            ("worker", "state"),
        ),
        Gauge(
            "warmroute_workers",
            "Workers by state; 0 where there are none.",
            lambda: [
                ((state.value,), sum(worker.state is state for worker in fleet.workers.values())) for state in State
            ],
            ("state",),
        ),
        Gauge(
            "warmroute_sessions_dropped",
            "Sessions forgotten for want of room.",
            lambda: [((), gateway.sessions.dropped)],
        ),
        Gauge(
            "warmroute_sessions_expired", "Sessions forgotten for idleness.", lambda: [((), gateway.sessions.expired)]
        ),
        Gauge("warmroute_index_bytes", "Estimated size of the prefix index.", lambda: [((), index.radix.bytes)]),
        Gauge(
            "warmroute_index_remembered_bytes",
            "Of those, for prompts that nobody holds any more: how far back the ceiling reaches.",
            lambda: [((), index.radix.remembered_bytes)],
        ),
        Gauge(
            "warmroute_blocks_bytes",
            "Estimated size of the index of blocks that events told of.",
            lambda: [((), index.blocks.footprint)],
        ),
        Gauge(
            "warmroute_preparing", "Requests whose token ids are being made.", lambda: [((), len(gateway.preparing))]
        ),
        Gauge("warmroute_sessions", "Live sessions.", lambda: [((), len(gateway.sessions))]),
        Gauge("warmroute_connections", "Client connections.", lambda: [((), len(gateway.server.connections))]),
        Gauge("warmroute_exchanges", "Requests being answered.", lambda: [((), len(gateway.exchanges))]),
        Gauge("warmroute_defects", "Errors of the gateway's own since its start.", lambda: [((), gateway.defects)]),
    ]
