"""Making a gateway one of several: who is told of what, and who asks whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.config import Config
from gateway.config_reader import ConfigError, Problem
from gateway.replicas.local import Local
from gateway.replicas.replicas import Replicas
from gateway.replicas.shared import Shared
from gateway.seat import Seat
from gateway.series import Gauge

if TYPE_CHECKING:
    from gateway.run import Running


def make_replicas(running: Running, config: Config, seat: Seat | None) -> Replicas | None:
    """Its part among several; ``None``: it is the only one. Raises `ConfigError`."""
    if seat is None and config.replicas.redis is None:
        return None
    gateway = running.gateway
    replicas = Replicas(
        gateway.fleet,
        gateway.sessions,
        gateway.index,
        gateway.meters,
        gateway.routing.pins,
        gateway.metrics,
        busy=lambda: bool(gateway.exchanges),
        host=b"" if seat is None else bytes.fromhex(seat.host),
        alone=seat is None or seat.processes == 1,
    )
    if seat is not None:
        replicas.buses.append(Local(seat.folder, replicas.who, replicas.hear))
    told = config.replicas
    if told.redis is not None:
        try:
            shared = Shared(
                str(told.redis),
                told.scope,
                replicas.who,
                replicas.host,
                config.sessions.idle,
                replicas.hear,
                replicas.remember,
            )
        except ValueError as error:
            raise ConfigError([Problem(None, "replicas.redis", str(error))]) from None
        replicas.buses.append(shared)
    gateway.routing.replicas = replicas
    gateway.routing.holdings.heard = replicas.heard
    gateway.sessions.elsewhere = replicas.taken.by_key
    gateway.sessions.ends.elsewhere = replicas.taken.by_end
    gateway.sessions.ended = replicas.said.ended
    gateway.metrics.gauges += gauges(replicas)
    return replicas


def gauges(replicas: Replicas) -> list[Gauge]:
    """For the metrics."""
    said = replicas.said
    return [
        Gauge(
            "warmroute_replicas",
            "Other gateways that are heard.",
            lambda: [((), float(len(replicas.peers)))],
        ),
        Gauge(
            "warmroute_replicas_deaf",
            "1 while other gateways cannot be heard, so that this one goes on alone.",
            lambda: [((), float(replicas.deaf is not None))],
        ),
        Gauge(
            "warmroute_replicas_unsaid",
            "Words that wait to be said.",
            lambda: [((), float(said.waiting))],
        ),
        Gauge(
            "warmroute_replicas_known",
            "What is known of others: sessions that did not come here, marks of prompts that were sent elsewhere.",
            lambda: [(("sessions",), float(len(replicas.elsewhere))), (("marks",), float(len(replicas.heard)))],
            ("what",),
        ),
    ]
