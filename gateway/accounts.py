"""What is counted and learned of exchanges: rates, hits, beliefs, sessions, and what the doctor may see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gateway.asks import Ask
from gateway.dialects import Usage
from gateway.dialects.chat import answered_ids
from gateway.doctor import Note
from gateway.exchange import Exchange
from gateway.metrics import Tally, hit_of
from gateway.naming import LONGEST
from gateway.opened import Opened
from gateway.routing import CONVERSATION
from gateway.sessions import Session
from gateway.workers import Charge, Target, Worker
from policies.base import Role

if TYPE_CHECKING:
    from gateway.app import Gateway

FINAL = frozenset((b"1", b"true", b"yes", b"on"))
"""Values of ``x-session-final`` that say so."""


class Accounts:
    """See the module's head."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def sent(self, exchange: Exchange) -> None:
        """The first attempt was sent."""
        gateway = self.gateway
        gateway.retries_left = min(gateway.retries_left + gateway.retry_budget, 1000.0)
        ask, choice, target = exchange.ask, exchange.choice, exchange.target
        assert choice is not None
        assert target is not None
        tally = gateway.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, gateway.label(target))
        now = exchange.written_at = gateway.clock()
        tally.sent(choice.reason, now - exchange.started)
        gateway.metrics.stages(exchange, now)
        if choice.prefill is not None or target.role is not Role.UNIFIED:
            way = "pair" if choice.prefill is not None else "local"
            gateway.metrics.pair_decisions.add((ask.model_name, way, choice.reason))
            if isinstance(choice.prefill, Target):
                gateway.metrics.routed.add((ask.model_name, gateway.label(choice.prefill)))
        if ask.found is not None:
            gateway.metrics.session_sources.add((ask.found,))

    def begun(self, exchange: Exchange) -> None:
        """The client's answer begins: the worker serves, and the request will not be sent again."""
        target = exchange.target
        if target is not None and exchange.status < 500 and target.breaker.open_until is not None:
            self.gateway.fleet.succeeded(target, exchange.charge)
        self.gateway.routing.begun(exchange.ask, exchange.status < 300)

    def heard(self, worker: Worker) -> float:
        """When a byte of any running answer last came from ``worker``."""
        return max(
            (e.last_at for e in self.gateway.exchanges if e.target is not None and e.target.worker is worker),
            default=0.0,
        )

    def first_event(self, exchange: Exchange, charge: Charge) -> None:
        """The first event of a stream came: its prefill is over."""
        gateway = self.gateway
        target = charge.target
        gateway.fleet.first_byte(charge)
        seconds = exchange.first_at - exchange.sent_at
        target.record.began(seconds, charge.expected)
        target.began(seconds, charge.expected)
        ask = exchange.ask
        legs = exchange.legs
        if legs is not None:
            gateway.pairs.begun(exchange, legs)
        tally = gateway.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, gateway.label(target))
        if ask.predicted is not None:
            hit = hit_of(ask.predicted, ask.request.tokens)
            tally.first_token(_turn(ask.turn), hit, exchange.first_at - exchange.started)
        if charge.alone and legs is None and ask.request.tokens is not None:
            exchange.alone = True

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None, streaming: bool) -> None:
        """An exchange is over, whatever the outcome."""
        gateway, legs = self.gateway, exchange.legs
        if legs is not None:
            usage = gateway.pairs.usage(legs, usage)
        seconds = gateway.clock() - exchange.started
        try:
            self._ended(exchange, outcome, usage, streaming, seconds)
        finally:
            self._give_back(exchange.ask)
            self._tell(exchange, outcome, usage, seconds)

    def _tell(self, exchange: Exchange, outcome: str, usage: Usage | None, seconds: float) -> None:
        """Whoever only looks on; what fails there is no matter of the request's."""
        gateway = self.gateway
        try:
            if gateway.sample is not None:
                gateway.sample.ended(exchange, outcome, usage, seconds)
            if gateway.request_log is not None:
                gateway.request_log.ended(exchange, outcome, usage, seconds)
            if gateway.tracer is not None and (exchange.trace is not None or not exchange.attempts):
                gateway.tracer.ended(exchange, outcome, usage)
        except Exception:
            gateway.defect("telling of a request")

    def _ended(self, exchange: Exchange, outcome: str, usage: Usage | None, streaming: bool, seconds: float) -> None:
        gateway = self.gateway
        ask, target, legs = exchange.ask, exchange.target, exchange.legs
        opened = exchange.reading.opened
        if isinstance(opened, Opened) and not exchange.settles:
            assert gateway.opened is not None
            gateway.opened.over(opened)
        if ask.told or ask.slot is not None:
            assert gateway.lifecycle is not None
            gateway.lifecycle.over(ask)
        if exchange.metered is not None:
            self._meter(exchange, exchange.metered, usage)
        if exchange.queued is not None:
            gateway.admission.answered(exchange, usage)
        if target is None:
            who = (ask.tenant.name, ask.model_name, ask.policy.name)
            gateway.metrics.requests.add((who[0], who[1], exchange.route.kind, who[2], outcome))
            gateway.metrics.duration.observe(who, seconds)
            return
        tally = gateway.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, gateway.label(target))
        tally.ended(exchange.route.kind, outcome, seconds)
        if not streaming:
            return
        if gateway.recorder is not None and exchange.noted is not None:
            gateway.recorder.ended(exchange, exchange.noted, outcome, usage, seconds)
        said = answered_ids(exchange.tail) if ask.returns and not exchange.events else None
        computes = target if legs is None else legs.prefill
        gateway.routing.settle(ask, target, usage, gateway.clock(), said, computes)
        if ask.body is not None:
            self._examine(ask, exchange, usage)
        if legs is not None and outcome == "ok":
            gateway.pairs.ended(exchange, legs)
        if exchange.alone:
            self._calibrate(exchange, target, usage)
        if computes is not target:
            # Its prompt is counted where it was computed.
            first = gateway.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, gateway.label(computes))
        else:
            first = tally
        if ask.predicted is not None and ask.request.tokens is not None:
            first.predicted[0] += ask.predicted
            first.predicted_prompt[0] += ask.request.tokens
            best = max(ask.predicted, max(ask.request.holdings.values(), default=0))
            first.best[0] += best
            first.ceiling[0] += max(best, ask.ceiling)
            hit = hit_of(ask.predicted, ask.request.tokens)
        else:
            hit = hit_of(usage.cached, usage.prompt) if usage is not None else "unknown"
            if exchange.events and exchange.first_at:
                tally.first_token(_turn(ask.turn), hit, exchange.first_at - exchange.started)
        if usage is not None:
            self._count_usage(exchange, usage, tally, first, computes, hit)
        if exchange.route.kind == "responses" and outcome == "ok":
            self._remember_response(exchange, target)
        if outcome == "ok" and ask.session is not None:
            final = exchange.incoming.named.get(b"x-session-final")
            if final is not None and final.strip().lower() in FINAL:
                gateway.sessions.end(ask.session)

    def _meter(self, exchange: Exchange, metered: tuple[int, int, float], usage: Usage | None) -> None:
        """Put right what its tenant was counted for it."""
        meter, now = exchange.ask.tenant.meter, self.gateway.clock()
        if meter is None:
            return
        prompt, computed, asked = metered
        if not exchange.attempts:
            # Nothing was done for it.
            meter.corrects(-prompt, -computed, asked, now)
            meter.refused(exchange.started, now)
        elif usage is not None and usage.prompt is not None:
            cached = usage.cached if usage.cached is not None else exchange.ask.context
            meter.corrects(usage.prompt - prompt, max(0, usage.prompt - cached) - computed, asked, now)

    def _calibrate(self, exchange: Exchange, target: Target, usage: Usage | None) -> None:
        """Learn from a first event that nothing else delayed."""
        seconds = exchange.first_at - exchange.sent_at
        brought = exchange.ask.request.fetched.get(target.id)
        if brought:
            held = brought if usage is None or usage.cached is None else usage.cached
            rest = target.rates.prefill(max(0, (exchange.ask.request.tokens or held) - held), held)
            target.calibration.moved(brought, max(1e-4, seconds - rest))
            return
        back = exchange.ask.request.restored.get(target.id)
        if back is not None:
            if usage is not None and usage.prompt is not None and usage.cached is not None:
                rest = target.rates.prefill(usage.prompt - usage.cached, usage.cached)
                target.calibration.restored(back, max(0.0, seconds - rest))
            return
        if usage is not None and usage.prompt is not None and usage.cached is not None:
            # What the engine says was computed, not what was believed: a wrong belief must not become a rate.
            self.gateway.fleet.learn(target, usage.prompt - usage.cached, usage.cached, seconds)
        elif exchange.ask.request.tokens is not None:
            context = exchange.ask.context
            self.gateway.fleet.learn(target, exchange.ask.request.tokens - context, context, seconds)

    def _count_usage(
        self, exchange: Exchange, usage: Usage, tally: Tally, first: Tally, computes: Target, hit: str
    ) -> None:
        """``first``: of ``computes``, the target that computed the prompt."""
        ask = exchange.ask
        if usage.prompt is not None:
            first.prompt[0] += usage.prompt
            computes.worker.told_cached(usage.cached is not None)
            if usage.cached is not None:
                first.cached[0] += usage.cached
                first.reported[0] += usage.prompt
                if usage.cached:
                    new = max(0, usage.prompt - usage.cached)
                    spared = computes.rates.prefill(usage.prompt, 0) - computes.rates.prefill(new, usage.cached)
                    first.saved[0] += max(0.0, spared)
                if ask.predicted is not None and usage.prompt:
                    error = (usage.cached - ask.predicted) / usage.prompt
                    self.gateway.metrics.prediction_error.observe((ask.model_name,), error)
        if usage.completion is not None:
            tally.completion[0] += usage.completion
            if exchange.events and usage.completion > 1 and exchange.last_at > exchange.first_at:
                between = (exchange.last_at - exchange.first_at) / (usage.completion - 1)
                tally.between_tokens(hit, between)

    def _remember_response(self, exchange: Exchange, target: Target) -> None:
        ask = exchange.ask
        found = _response_id(exchange.first) or _response_id(exchange.tail)
        if found is not None:
            self.gateway.routing.pin(ask.tenant, found, target.worker.id, ask.session)
        conversation = exchange.reading.conversation
        if conversation is not None and len(conversation) <= LONGEST:
            self.gateway.routing.pin(ask.tenant, CONVERSATION + conversation, target.worker.id, ask.session)

    def breaks(self, session: Session) -> list[dict[str, object]] | None:
        """Where the session's prompts broke from those before, as far as it was examined; ``None``: the doctor is off."""
        return None if self.gateway.doctor is None else self.gateway.doctor.breaks(session.hash)

    def examining(self, exchange: Exchange) -> None:
        """Its answer begins, and its body would go: what is kept of it."""
        gateway, ask = self.gateway, exchange.ask
        if gateway.pressure.rung:
            if gateway.doctor is not None:
                gateway.metrics.pressure_skipped.add(("doctor",))
            return
        if ask.new_session and ask.prompt is not None and gateway.roots is not None and exchange.status < 300:
            incoming = exchange.incoming
            salt = gateway.inserts.salt(ask) if ask.tenant.isolated else None
            gateway.roots.saw(ask, ask.prompt, incoming.path, incoming.body, salt, gateway.clock())
        self._wants(exchange)

    def _wants(self, exchange: Exchange) -> None:
        """The doctor may want to see it."""
        doctor, ask, reading = self.gateway.doctor, exchange.ask, exchange.reading
        session = ask.session
        if doctor is None or session is None or exchange.status >= 300 or ask.model is None:
            return
        if ask.new_session and doctor.behind:
            # More begin than can be examined: this one will be looked at when it goes on.
            return
        body = exchange.incoming.body
        # What goes on from state of an engine's says a part of its prompt only.
        if reading.previous is None and reading.opened is None and doctor.wants(session.hash, len(body)):
            doctor.begun(len(body))
            ask.body = body

    def _give_back(self, ask: Ask) -> bytes | None:
        """The body that was held for the doctor, which is not any more."""
        body, ask.body = ask.body, None
        if body is not None and self.gateway.doctor is not None:
            self.gateway.doctor.over(len(body))
        return body

    def _examine(self, ask: Ask, exchange: Exchange, usage: Usage | None) -> None:
        """Give the doctor what it wanted."""
        gateway = self.gateway
        assert gateway.doctor is not None
        assert ask.session is not None
        assert ask.model is not None
        body = self._give_back(ask)
        if body is None or ask.session.gone:
            # What is kept of a session ended with it.
            return
        gateway.doctor.seen(
            Note(
                ask.tenant.name,
                ask.model.label,
                ask.session.hash,
                exchange.route.kind,
                body,
                ask.model.thinking,
                None if usage is None else usage.prompt,
                None if usage is None else usage.cached,
                ask.before,
                ask.shared,
                ask.new_session,
                gateway.clock(),
            )
        )


def _turn(turn: int) -> str:
    if turn <= 0:
        return "none"
    return "1" if turn == 1 else "2-5" if turn <= 5 else "6-20" if turn <= 20 else "21+"


_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


def _response_id(part: bytes) -> str | None:
    """The id of a response in the part of its answer that has it."""
    found = _RESPONSE_ID.search(part)
    return found[1].decode() if found is not None else None
