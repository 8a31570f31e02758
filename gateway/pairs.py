"""What all pairs of prefill and decode engines share: their protocols, whose fault a failure was, what is learned of transfers.

When handing over KV fails, the engine that says so is not always the one that failed: the KV may not have been there, or the
engine may be broken. So failures are counted for each engine until it succeeds, with whomever. Of two that failed together the
one that failed more often since is guilty; while both failed as often, nobody is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from os import urandom
from typing import TYPE_CHECKING

import msgspec

from gateway.dialects import Usage
from gateway.disagg import all_protocols
from gateway.disagg.nixl import offered, read
from gateway.errors import Fault, ServerError, Stalled, WorkerFault
from gateway.legs import Handed, Legs
from gateway.notice import post
from gateway.workers import State, Target, Worker
from policies.base import Choice, Role

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.config import Disaggregation
    from gateway.exchange import Exchange

log = logging.getLogger("warmroute")

NOTICES = 1024
"""Aborts that may be on their way at a time."""


class Pairs:
    """See the module's head."""

    def __init__(self, gateway: Gateway, told: Disaggregation) -> None:
        self.gateway = gateway
        self.lease = told.lease
        self.bidirectional = told.bidirectional
        self.keep = told.keep
        self.protocols = all_protocols()
        self.doubt: Callable[[Worker], None] = lambda worker: None
        """Told when what is known of a worker may be out of date."""
        self.lingering: set[Legs] = set()
        """Those whose client has its answer while the prefill engine still answers."""
        self._notices: set[asyncio.Task[int | None]] = set()

    # -- beginning --------------------------------------------------------------------------------------------------

    def takes(self, kind: str, body: bytes) -> Callable[[str], bool]:
        """Whether a protocol can split a request of that route and body; each is asked once."""
        known: dict[str, bool] = {}

        def takes(name: str) -> bool:
            found = known.get(name)
            if found is None:
                protocol = self.protocols.get(name)
                found = known[name] = protocol is not None and protocol.takes(kind, body)
            return found

        return takes

    def legs(self, exchange: Exchange, choice: Choice, handed: Handed | None) -> Legs:
        """The two parts of an attempt. Raises `Fault`."""
        prefill, decode = choice.prefill, choice.target
        assert isinstance(prefill, Target)
        assert isinstance(decode, Target)
        protocol = self.protocols.get(prefill.worker.protocol or "")
        if protocol is None:
            raise ServerError("how the prefill worker hands over KV is not known")
        ask = exchange.ask
        tokens = ask.request.tokens or 0
        held = ask.request.holdings.get(decode.id, 0)
        lent = None
        if choice.source is not None and handed is None and ask.session is not None:
            offer = self.gateway.routing.offers.fits(ask.session.key, ask.ids or b"", self.gateway.clock())
            if offer is not None:
                lent = offer.params
                self.gateway.metrics.pair_returns.add((ask.model_name, "used"))
                # Once: the decode engine lets go of it when it is read, and whoever reads it later reads others' KV.
                self.gateway.routing.offers.drop(ask.session.key)
        if held > ask.context:
            self.gateway.metrics.pair_recomputed.add((ask.model_name,), held - ask.context)
        return Legs(
            exchange,
            protocol,
            prefill,
            decode,
            context=ask.context,
            moved=max(0, tokens - held),
            lent=lent,
            handed=handed,
            tells_ids=self.bidirectional and protocol.name == "nixl" and bool(ask.ids) and ask.session is not None,
        )

    def source(self, exchange: Exchange) -> bytes | None:
        """Parameters with which an engine fetches KV from the session's home (vLLM's OffloadingConnector with its P2P tier).

        Safe with any prompt: the peer is asked for blocks by their content.
        """
        home = self.gateway.fleet.targets.get(exchange.ask.request.home or 0)
        if home is None or home.worker.spec.source is None or home.worker.state is not State.READY:
            return None
        host, port = home.worker.spec.source
        name = f"wr-{urandom(8).hex()}"
        self.gateway.metrics.fetches.add((exchange.ask.model_name,))
        told = {"remote_kv_source": {"kv_request_id": name, "remote_host": host, "remote_port": port + home.rank}}
        return msgspec.json.encode(told)

    # -- what happens -----------------------------------------------------------------------------------------------

    def prefilled(self, legs: Legs, body: bytes) -> None:
        """The prefill engine computed the prompt."""
        gateway, exchange, leg = self.gateway, legs.exchange, legs.leg
        now = gateway.clock()
        charge = legs.charge
        legs.release()
        gateway.fleet.succeeded(legs.prefill, charge)
        gateway.routing.prefilled(exchange.ask, legs.prefill, now)
        legs.usage = exchange.dialect.usage(body, not legs.sequential and exchange.reading.stream)
        if not legs.sequential or leg is None:
            return
        if legs.tells_ids:
            told = read(body)
            ids = None if told is None else told.prompt
            if ids is not None and ids == exchange.ask.ids:
                legs.ids = ids
            else:
                # What cannot be compared, or was rendered otherwise, is not safe to go on from.
                why = "untold" if ids is None else "rendered_otherwise"
                gateway.metrics.pair_returns.add((exchange.ask.model_name, why))
        if charge is None or not charge.alone or legs.pair.lent is not None:
            return
        usage = legs.usage
        seconds = now - leg.sent_at
        if usage is not None and usage.prompt is not None and usage.cached is not None:
            gateway.fleet.learn(legs.prefill, usage.prompt - usage.cached, usage.cached, seconds)
        elif exchange.ask.request.tokens is not None:
            gateway.fleet.learn(legs.prefill, charge.uncached, charge.context, seconds)

    def begun(self, exchange: Exchange, legs: Legs) -> None:
        """The decode engine generates: the KV is there."""
        charge = legs.charge
        if charge is not None:
            # Its part is done, whether or not it has said so yet.
            self.gateway.fleet.first_byte(charge)
            legs.release()
        if not legs.sequential:
            return
        seconds = exchange.first_at - exchange.sent_at
        self.gateway.metrics.transfer.observe((exchange.ask.model_name,), seconds)
        if exchange.charge is not None and exchange.charge.alone and legs.moved:
            legs.decode.calibration.moved(legs.moved, seconds)

    def usage(self, legs: Legs, usage: Usage | None) -> Usage | None:
        """The client's usage, with the cached tokens of the engine that computed the prompt; ``None`` of them where it did not
        tell and the other tells its own."""
        if usage is None:
            return None
        cached = None if legs.usage is None else legs.usage.cached
        if cached is None and legs.protocol.tells_cached:
            return usage
        return usage._replace(cached=cached)

    def ended(self, exchange: Exchange, legs: Legs) -> None:
        """The answer is complete: keep what the decode engine offers for the session's next turn."""
        legs.prefill.failed_pairs = legs.decode.failed_pairs = 0
        ask = exchange.ask
        session = ask.session
        if legs.ids is None or session is None:
            return
        gateway = self.gateway
        found = offered(legs.whole or exchange.tail, exchange.events)
        if found is None:
            return
        tokens, params, said = found
        gateway.metrics.pair_returns.add((ask.model_name, "offered"))
        until, at = gateway.clock() + self.keep, legs.decode
        gateway.routing.offers.put(session.key, at.id, at.epoch, params, legs.ids + said, tokens, until)

    # -- failing ----------------------------------------------------------------------------------------------------

    def failed(self, legs: Legs, fault: Fault, by: Target, message: str) -> Target | None:
        """One of a pair failed before the answer began, ``by`` as it seems; whose fault it is, ``None`` if nobody can tell."""
        gateway = self.gateway
        guilty: Target | None = by
        stage = "prefill" if by is legs.prefill else "decode"
        blamed = legs.protocol.blames(message) if isinstance(fault, ServerError) else None
        if by is legs.decode and blamed is not None:
            stage, guilty = "transfer", legs.prefill if blamed is Role.PREFILL else legs.decode
        elif self._between(legs, fault, by, blamed is not None or "handshake" in message.lower()):
            stage, guilty = "transfer", self._guilty(legs)
        if stage == "transfer":
            # Its process may be another one by now.
            self.doubt(legs.prefill.worker)
        side = "unknown" if guilty is None else str(Role.PREFILL if guilty is legs.prefill else Role.DECODE)
        if isinstance(fault, WorkerFault):
            gateway.metrics.pair_failures.add((legs.exchange.ask.model_name, side, stage))
        return guilty

    def _between(self, legs: Legs, fault: Fault, by: Target, named: bool) -> bool:
        """Whether it may have been either; ``named``: an error tells of the other."""
        if not isinstance(fault, ServerError | Stalled):
            return False
        if by is legs.prefill and legs.pair.lent is not None:
            return True
        if legs.sequential:
            # The prefill engine has done its part, as it said. Engines begin to answer a stream before they have the KV: one
            # that did not even begin is silent for reasons of its own.
            began = not isinstance(fault, Stalled) or legs.exchange.status or not legs.exchange.reading.stream
            return by is legs.decode and legs.answer is not None and legs.decode_sent and bool(began)
        # Each waits for the other, and says that it waited in vain.
        return isinstance(fault, Stalled) or named

    def _guilty(self, legs: Legs) -> Target | None:
        prefill, decode = legs.prefill, legs.decode
        prefill.failed_pairs += 1
        decode.failed_pairs += 1
        if prefill.failed_pairs == decode.failed_pairs:
            return None
        return prefill if prefill.failed_pairs > decode.failed_pairs else decode

    def notify(self, worker: Worker, path: str, body: bytes, credential: bytes = b"") -> None:
        """Tell ``worker`` something that needs no answer; dropped when too much is on its way already."""
        if len(self._notices) >= NOTICES:
            return
        task = self.gateway.loop.create_task(post(worker, path, body, credential))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Upkeep: what lingers, offers that are over."""
        self.lingering = {legs for legs in self.lingering if not legs.give_up(now)}
        self.gateway.routing.offers.sweep(now)

    async def stop(self) -> None:
        """End what is still on its way."""
        for legs in self.lingering:
            legs.give_up(float("inf"))
        self.lingering.clear()
        notices = list(self._notices)
        if notices:
            await asyncio.wait(notices, timeout=1.0)
        for task in notices:
            task.cancel()
        await asyncio.gather(*notices, return_exceptions=True)
