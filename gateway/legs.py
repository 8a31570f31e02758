"""Running a pair: the steps of a protocol (`gateway.disagg`) for one attempt of one exchange.

The decode engine's part is the exchange's own: its answer is the client's. The prefill engine's is a `Leg`, whose answer the
client never sees. `Legs` runs the steps between them and ends what is left when one fails:

    sequential   leg answers -> its answer makes the decode engine's request -> the exchange sends that
    concurrent   both are sent; the leg's answer is of no use but for its logprobs

First failure ends both: connections are closed, and engines that need to be told are told (`Protocol.abort`), because a
partner that is left alone keeps KV for minutes. What the prefill engine computed stays good if the decode engine never saw the
request: it is handed to another one while its lease lasts (`Handed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from os import urandom
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.dialects import Usage
from gateway.disagg import End, Pair, Protocol, Send, Steps, wants
from gateway.disagg.logprobs import Logprobs, merged, prompt_logprobs
from gateway.disagg.nixl import hidden
from gateway.errors import (
    Fault,
    Internal,
    Reset,
    Stalled,
)
from gateway.http.relay import Relay
from gateway.leg import Leg
from gateway.retold import Hiding, Merged
from gateway.workers import Charge, State, Target, Worker
from policies.base import Role

if TYPE_CHECKING:
    from gateway.exchange import Exchange

LINGER = 30.0
"""Seconds for which a prefill engine may still answer when the client has its answer."""
DOUBT = 0.1
"""Seconds within which the other of two that failed together says so."""


class Handed(NamedTuple):
    """A prompt's KV that waits on its prefill engine for somebody to fetch it."""

    prefill: Target
    answer: bytes
    until: float


class Legs:
    """One attempt with a pair; see the module's head."""

    __slots__ = (
        "aborting",
        "answer",
        "before_decode",
        "charge",
        "context",
        "decode",
        "decode_body",
        "decode_sent",
        "doubt",
        "ended",
        "exchange",
        "first",
        "ids",
        "leg",
        "moved",
        "pair",
        "prefill",
        "protocol",
        "reads",
        "reads_prompt",
        "sequential",
        "steps",
        "tells_ids",
        "until",
        "usage",
        "wants_ids",
        "whole",
    )

    def __init__(
        self,
        exchange: Exchange,
        protocol: Protocol,
        prefill: Target,
        decode: Target,
        *,
        context: int = 0,
        moved: int = 0,
        lent: bytes | None = None,
        handed: Handed | None = None,
        tells_ids: bool = False,
    ) -> None:
        self.exchange = exchange
        self.protocol = protocol
        self.prefill = prefill
        self.decode = decode
        self.context = context
        """Tokens that the prefill engine is believed to hold."""
        self.moved = moved
        """Tokens that the decode engine must get."""
        self.tells_ids = tells_ids
        self.ids: bytes | None = None
        """Token ids of the prompt, where the prefill engine told the very ones that were rendered here."""
        self.leg: Leg | None = None
        self.charge: Charge | None = None
        self.decode_body = b""
        self.decode_sent = False
        """The decode engine may have seen its request."""
        self.sequential = False
        self.reads = True
        """The prefill engine's answer is of use."""
        self.ended = False
        self.doubt: asyncio.TimerHandle | None = None
        self.answer: bytes | None = None if handed is None else handed.answer
        """The prefill engine's, in sequential protocols."""
        self.usage: Usage | None = None
        """What the prefill engine reports."""
        self.whole = b""
        """The decode engine's answer as it came, where the client's is made of it."""
        self.first: Logprobs = {}
        """What the prefill engine says of the prompt's logprobs."""
        self.until = inf if handed is None else handed.until
        """When what the prefill engine holds for the decode engine is given up."""
        body = exchange.gateway.inserts.body_for(exchange, decode)
        self.pair = Pair(
            end_of(prefill),
            end_of(decode),
            exchange.route.kind,
            body,
            exchange.request_id.decode("latin-1"),
            # Never of anything that a client says: who can name another's room takes its KV.
            int.from_bytes(urandom(8), "little"),
            lent,
            tells_ids,
        )
        self.steps: Steps = protocol.steps(self.pair)
        self.wants_ids = tells_ids and wants(body, "return_token_ids")
        """The client asked for token ids itself."""
        self.before_decode = False
        """The decode engine was not even asked yet."""
        self.aborting = protocol.abort(self.pair)
        self.reads_prompt = wants_logprobs(self.pair)

    def begin(self, tokens: int) -> None:
        """Charge both and send the first step. Raises `Fault`."""
        gateway = self.exchange.gateway
        if self.answer is None:
            self.charge = gateway.fleet.dispatch(self.prefill, tokens - self.context, self.context, True)
        self._step(next(self.steps))

    def _step(self, sends: list[Send]) -> None:
        alone = len(sends) == 1
        for send in sends:
            if send.role is Role.DECODE:
                self.decode_body = send.body
                self.before_decode = False
                self.exchange.open()
                continue
            if alone:
                self.sequential = self.before_decode = True
                if self.answer is not None:
                    self._next(self.answer)
                    return
            else:
                self.reads = self.reads_prompt
            self.leg = Leg(self, self.prefill, self.charge, send.body)
            self.exchange.deadline = (
                inf
                if not alone
                else self.exchange.gateway.clock() + (self.exchange.gateway.limits_out.first_byte_seconds)
            )
            self.leg.open()

    def _next(self, answer: bytes) -> None:
        try:
            sends = self.steps.send(answer)
        except StopIteration:
            return
        self._step(sends)

    # -- the prefill engine -----------------------------------------------------------------------------------------

    def prefilled(self, body: bytes) -> None:
        """It computed the prompt."""
        exchange = self.exchange
        gateway = exchange.gateway
        gateway.pairs.prefilled(self, body)
        if self.ended:
            gateway.pairs.lingering.discard(self)
            return
        if not self.sequential:
            if self.merges:
                self.first.update(prompt_logprobs(body, exchange.reading.stream))
                exchange.prefill_answered()
            return
        self.answer = body
        if self.protocol.lease is not None:
            self.until = gateway.clock() + gateway.pairs.lease
        try:
            self._next(body)
        except Fault as fault:
            self.prefill_failed(fault)
        except Exception:
            gateway.defect("going on from a prefill worker's answer")
            self.prefill_failed(Internal("the gateway failed; its log says why"))

    def begun(self) -> None:
        """The answer begins: nothing is sent again, and a long stream does not keep its prompt in memory."""
        self.pair.body = self.decode_body = b""
        self.answer = None

    def prefill_refused(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        """It answered with an error."""
        exchange = self.exchange
        if self.ended:
            exchange.gateway.pairs.lingering.discard(self)
            return
        if not self.sequential and status >= 500 and exchange.connection is not None:
            # It may be the other that failed, which is about to say so.
            self.doubt = exchange.gateway.loop.call_later(DOUBT, exchange.prefill_refused, status, fields, body)
            return
        exchange.prefill_refused(status, fields, body)

    def prefill_failed(self, fault: Fault) -> None:
        """It will not answer."""
        if self.ended:
            self.exchange.gateway.pairs.lingering.discard(self)
            return
        self.exchange.prefill_failed(fault)

    @property
    def merges(self) -> bool:
        """The client's answer is made of both."""
        return self.reads and not self.sequential

    @property
    def rewrites(self) -> bool:
        """The client's answer is not the decode engine's as it stands."""
        return self.hides or self.merges

    @property
    def hides(self) -> bool:
        """The decode engine's answer may hold what is not for clients: where its KV is, token ids that only we asked for."""
        return self.protocol.answers_params

    def rewritten(self, answer: bytes) -> bytes:
        """The client's answer, of the decode engine's whole one."""
        if self.merges:
            return merged(answer, self.first)
        self.whole = answer
        return hidden(answer, self.tells_ids and not self.wants_ids)

    def relay(self) -> Callable[..., Relay]:
        """Makes what passes the decode engine's events on."""
        if self.merges:
            return self._merged
        return self._hiding if self.hides else Relay

    def _merged(self, *told: Any, **options: Any) -> Relay:
        made = Merged(*told, **options)
        made.before = self.first
        return made

    def _hiding(self, *told: Any, **options: Any) -> Relay:
        made = Hiding(*told, **options)
        made.ids, made.usage = self.tells_ids and not self.wants_ids, self.exchange.injected
        return made

    @property
    def waits(self) -> bool:
        """The prefill engine has not answered yet."""
        return self.leg is not None and not self.leg.over

    def overdue(self, now: float) -> bool:
        """The prefill engine did not answer in time."""
        return self.leg is not None and not self.leg.over and now > self.leg.deadline

    def worker_down(self, worker: Worker) -> None:
        """A worker does not answer any more: if it is the prefill engine's, and its part is not done, that is over."""
        if self.prefill.worker is worker and self.leg is not None and not self.leg.over:
            self.leg.close()
            self.prefill_failed(Reset("the worker went down"))

    # -- ending -----------------------------------------------------------------------------------------------------

    def handed(self, now: float) -> Handed | None:
        """What another decode engine can still fetch: the present one never saw the request."""
        if self.answer is None or self.decode_sent or now >= self.until or self.prefill.worker.state is State.DOWN:
            return None
        return Handed(self.prefill, self.answer, self.until)

    def release(self) -> None:
        """The prefill engine's charge ends; safe to call again."""
        charge, self.charge = self.charge, None
        if charge is not None:
            self.exchange.gateway.fleet.release(charge)

    def end(self, decode_done: bool = False) -> None:
        """Nothing of it goes on. ``decode_done``: the decode engine answered to the end, so the prefill engine may too."""
        if self.ended:
            return
        self.ended = True
        if self.doubt is not None:
            self.doubt.cancel()
        gateway = self.exchange.gateway
        leg = self.leg
        running = leg is not None and not leg.over
        if decode_done:
            self.release()
            if running and leg is not None:
                leg.deadline = gateway.clock() + LINGER
                gateway.pairs.lingering.add(self)
            return
        self.release()
        if leg is not None:
            leg.close()
        if self.aborting is not None:
            keyed = gateway.tenants.keyed
            own = b"" if keyed else self.exchange.incoming.named.get(b"authorization", b"")
            if running:
                gateway.pairs.notify(self.prefill.worker, *self.aborting, own)
            if self.decode_sent:
                gateway.pairs.notify(self.decode.worker, *self.aborting, own)

    def give_up(self, now: float) -> bool:
        """Of one that lingers: whether it is over."""
        if self.leg is not None and not self.leg.over and now <= self.leg.deadline:
            return False
        if self.leg is not None:
            self.leg.close()
        return True


def stalled() -> Stalled:
    """The prefill engine's silence."""
    return Stalled("the prefill worker did not answer in time")


def end_of(target: Target) -> End:
    """``target`` as protocols see it."""
    worker = target.worker
    ids = worker.engine_ids
    return End(
        worker.host,
        target.rank,
        len(worker.targets),
        worker.bootstrap,
        ids[target.rank] if target.rank < len(ids) else None,
    )


def wants_logprobs(pair: Pair) -> bool:
    """Whether the prompt's logprobs, which only the prefill engine has, are asked for."""
    return pair.kind == "generate" and wants(pair.body, "return_logprob")
