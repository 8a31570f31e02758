"""From a request that was read to a choice of target: session, prompt, index, policy. Sends nothing.

`Routing.ask` gathers what the tenant's policy needs and nothing else; `Routing.choose` asks the policy; `Routing.commit`
makes the choice true (counter, home, index, pin) and `Routing.settle` learns from the end. A dry run stops before commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from gateway.asks import BY_IDS, Ask, Model, Options
from gateway.content import end_of
from gateway.dialects import Reading, Usage, no_field
from gateway.errors import BadRequest, NotFound, NoWorker
from gateway.fleet import Fleet
from gateway.holdings import Holdings, blocks_of
from gateway.metrics import Metrics
from gateway.offers import Offers
from gateway.opened import Opened
from gateway.pins import Pins
from gateway.prompt import Prompt, thinking_of
from gateway.returning import Returning
from gateway.sessions import KEPT, Session, Sessions
from gateway.tenants import Tenant
from gateway.trials import Policies, regret
from gateway.workers import State, Target
from kv_index.index import PrefixIndex
from kv_index.pages import SYMBOL, TEXT_PAGE, names
from policies.base import Candidate, Choice, Fleet as View, Policy, Request, Role, rendezvous
from policies.disaggregated import paired

if TYPE_CHECKING:
    from gateway.replicas.replicas import Replicas

CONVERSATION = "conversation "
"""Before the names of conversations, among those of responses."""
TOOL_NAME = 64
"""Characters of a tool's name that are kept."""


class Routing:
    """See the module's head. Times are seconds on the loop's clock."""

    def __init__(
        self, fleet: Fleet, sessions: Sessions, index: PrefixIndex, metrics: Metrics, options: Options
    ) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.metrics = metrics
        self.options = options
        self.models: dict[str, Model] = {}
        self.holdings = Holdings(fleet, index, options, self.models)
        self.default = options.default()
        """How models are routed of which nothing else is said."""
        self.offers = Offers()
        self.relief: Policies | None = None
        """What chooses in place of policies that ask the index, while the gateway has no time for that."""
        self.tenants: dict[str, Tenant] = {}
        """By name."""
        self.pins = Pins()
        self.returning = Returning(fleet)
        self.replicas: Replicas | None = None
        """Other gateways, if there are any."""
        self._paired: dict[int, tuple[Policy, Policy]] = {}

    def reconfigure(self, options: Options) -> None:
        """Models are named and routed otherwise from here on; what was learned of them stays."""
        self.options.become(options)
        self.default = options.default()
        self._paired = {}
        for name, model in self.models.items():
            model.thinking = options.thinking.get(name) or thinking_of(name)
            model.policies = options.policies.get(name) or self.default
            model.label = name if self._known(name) else model.label
            self.holdings.describe(model)

    # -- asking -----------------------------------------------------------------------------------------------------

    def model(self, name: str | None) -> Model | None:
        """The model that a request names (aliases resolved); ``None`` if it may go to any worker.

        Raises `NotFound` for a name that no worker serves and no configuration knows.
        """
        options = self.options
        if name is None:
            served = {model.name for worker in self.fleet.workers.values() for model in worker.facts.models}
            if len(served) != 1:
                if served:
                    raise BadRequest("model is missing: several are served here", param="model")
                return None
            (name,) = served
        name = options.real(name)
        model = self.models.get(name)
        if model is not None and (self.fleet.view(name) is not None or self._known(name)):
            return model
        if not self._known(name) and not self.fleet.serving(name):
            raise NotFound(f"the model {name!r} does not exist here", param="model")
        if model is None:
            if len(self.models) >= options.most_models:
                self.models.pop(next(iter(self.models)))
            thinking = options.thinking.get(name) or thinking_of(name)
            policies = options.policies.get(name) or self.default
            # An engine that lists no models takes any name: such names are a client's, and no label.
            label = name if self._known(name) else "unlisted"
            by_ids = float(name in options.by_ids)
            model = self.models[name] = Model(name, policies, thinking, by_ids=by_ids, fitted=by_ids, label=label)
            self.holdings.describe(model)
        return model

    def _known(self, name: str) -> bool:
        return name in self.options.configured or name in self.fleet.known_models

    def ask(
        self,
        tenant: Tenant,
        reading: Reading,
        named: Mapping[bytes, bytes],
        draw: int,
        now: float,
        *,
        memo: dict[object, object] | None = None,
        ids: bytes | None = None,
        salt: Callable[[Ask], str] | None = None,
        dry: bool = False,
    ) -> Ask:
        """Gather what the policy needs. Makes the session if it is new, unless ``dry``; changes nothing else.

        ``ids``: token ids of the prompt, where the gateway made them. ``salt`` makes the cache salt of isolated tenants.
        """
        if reading.model is not None:
            # Before it is looked for: what a tenant may not use it is not told of either.
            tenant.check_model(reading.model)
        wanted = None if reading.model is None else tenant.called(reading.model)
        model = None if reading.opaque and wanted is None else self.model(wanted)
        if tenant.models is not None:
            self._check_model(tenant, reading, model)
        policies = self._policies(tenant, model)
        ask = Ask(tenant, model, policies.main, reading)
        request = ask.request
        request.draw = draw
        if model is None:
            return ask
        request.ordinal = model.ordinal
        if reading.make_prompt is None or not (policies.needs_prefix or policies.needs_session):
            _share_out(ask, policies)
            return ask
        ask.namespace = b"\x00".join((model.space, tenant.space, reading.namespace))
        carried: int | None = None
        if policies.needs_session:
            found = self.sessions.name(named, reading, memo, tenant.seed)
            held = None
            if reading.previous is not None and (found is None or found.source not in ("configured", "sticky")):
                held = self._session_of(tenant, reading.previous, model, now, dry)
            if held is not None:
                ask.session, ask.found = held, "previous_response_id"
            elif found is not None:
                ask.session = self.sessions.find(found, tenant.name, model.name, now, dry)
                ask.found = found.source
                if found.carried is not None:
                    carried = self._carried_home(ask.session, found.carried.home, model, dry)
        if ids is None and policies.needs_prefix and reading.ids is not None:
            ids = reading.ids()
        if policies.needs_prefix or (ask.session is None and self.relief is None):
            # A prompt that is given as ids is those ids.
            given = ids if reading.ids is not None else None
            ask.prompt = reading.make_prompt(model.thinking) if given is None else Prompt([given], [])
            ask.size = len(ask.prompt.text)
            if ask.session is None and policies.needs_session:
                ask.scope = xxh3_64_intdigest(ask.namespace, tenant.seed)
                ask.session = self.sessions.by_content(ask.prompt, ask.scope, tenant.name, model.name, now, dry)
                ask.found = None if ask.session is None else "content"
        _share_out(ask, policies)
        self._meet(ask, model, now, carried, ids, salt)
        return ask

    def _policies(self, tenant: Tenant, model: Model | None) -> Policies:
        """How the tenant's requests for ``model`` are routed now."""
        policies = self.policies_of(tenant, None if model is None else model.name)
        return self.relief if self.relief is not None and policies.needs_prefix else policies

    def policies_of(self, tenant: Tenant, model: str | None) -> Policies:
        """How the tenant's requests for ``model`` are routed: as it says of that one, as it says, as the model says."""
        if model is not None:
            own = tenant.by_model.get(model)
            if own is not None:
                return own
        return tenant.policies or self.options.policies.get(model or "") or self.default

    def compare(self, ask: Ask, made: Choice, tried: Collection[int], now: float) -> None:
        """Ask the shadow what it would have done, and count how that compares."""
        shadow = ask.shadowed
        if shadow is None or ask.model is None:
            return
        view = self.view(ask, tried, now)
        if made.reason == "pinned" or made.target.id not in view.positions:
            # No policy chose that.
            return
        choice = (self._paired_policy(shadow) if view.prefill is not None else shadow).choose(ask.request, view, now)
        seconds, tokens = regret(ask.request, made, choice, now)
        agrees = (choice.target, choice.prefill) == (made.target, made.prefill)
        self.metrics.shadows(ask.tenant.name, ask.model_name, ask.policy.name, shadow.name, agrees, seconds, tokens)

    def _meet(
        self,
        ask: Ask,
        model: Model,
        now: float,
        carried: int | None = None,
        ids: bytes | None = None,
        salt: Callable[[Ask], str] | None = None,
    ) -> None:
        """What it meets now: its session's home, and what targets hold of its prompt."""
        session, request, reading = ask.session, ask.request, ask.reading
        if session is not None:
            ask.new_session = session.turns == 0 and session.running == 0
            ask.turn = session.turns + 1
            request.session = session.hash
            request.home = session.home if session.home is not None else carried
            if request.home is None and self.replicas is not None and self.replicas.deaf is not None:
                request.home = self._agreed(session)
            request.partner = session.partner
            # One of whose answer all is here but the end of its framing runs no more.
            request.siblings = session.running and session.running - sum([each.over() for each in session.live])
        request.turns = model.demand.turns
        if ask.prefixed and ask.prompt is not None:
            if ids is None:
                self.holdings.match(ask, ask.prompt, model)
            else:
                ask.ids = ids
                if salt is not None and ask.tenant.isolated:
                    ask.salt = salt(ask)
                elif ask.salt is None and reading.salt is not None:
                    ask.salt = reading.salt()
                self.holdings.match_ids(ask, ids, model, now)
                if session is not None and len(self.offers):
                    self._lent(request, session, ids, now)

    def renew(self, ask: Ask, now: float) -> None:
        """It waited, and is to be routed by what is true now."""
        model = ask.model
        if model is None or (ask.session is None and ask.prompt is None):
            return
        ask.request.ordinal = model.ordinal
        ask.namespace = ask.namespace.removesuffix(BY_IDS)
        self._meet(ask, model, now, ids=ask.ids)

    def pinned(self, ask: Ask, tried: Collection[int], now: float) -> Choice | None:
        """The choice where state lives on one worker: a stored response that this request goes on from or names."""
        opened = ask.reading.opened
        if isinstance(opened, Opened):
            return self._at_opened(opened, tried, now)
        reading = ask.reading
        previous = reading.previous or (None if reading.conversation is None else CONVERSATION + reading.conversation)
        if previous is None:
            return None
        worker_id, _ = self.pins.find(ask.tenant.name, previous)
        if worker_id is None:
            if reading.previous is not None and self.pins.others(ask.tenant.name, previous):
                # By chance it could reach the worker that has it.
                raise NotFound(f"no response {reading.previous!r} is known here", param="previous_response_id")
            return None
        worker = self.fleet.workers.get(worker_id)
        home = ask.request.home
        # Its process has the state, one of its ranks the KV.
        targets = sorted(worker.targets, key=lambda each: (each.id != home, each.homes)) if worker is not None else ()
        for target in targets:
            able = self.fleet.usable(target, now) or self.fleet.lingering(target.id, now) is not None
            if target.id not in tried and able:
                return Choice(target, "pinned", prefill=self.partner_of(target, ask, tried, now))
        told = reading.previous or reading.conversation
        raise NoWorker(f"the worker that holds {told!r} is gone or cannot be used now: its state cannot be reached")

    def _at_opened(self, opened: Opened, tried: Collection[int], now: float) -> Choice:
        """The one target on which a client's session was opened."""
        target = opened.target
        gone = self.fleet.targets.get(target.id) is not target
        serves = target.worker.state is State.DRAINING or self.fleet.usable(target, now)
        if gone or target.id in tried or not serves:
            raise NoWorker(
                "the worker on which this session was opened is gone or cannot be used now: open another one"
            )
        return Choice(target, "pinned")

    def pin(self, tenant: Tenant, name: str, worker: str, session: Session | None) -> None:
        """``worker`` alone has the state that goes by ``name``."""
        key = None if session is None else session.key
        self.pins.put(tenant.name, name, worker, key)
        if self.replicas is not None:
            self.replicas.said.pinned(tenant.name, name, worker, key)
        if session is not None:
            others = [each for each in session.pins if each[0] != name]
            session.pins = (*others[1 - KEPT :], (name, worker))

    def _session_of(self, tenant: Tenant, name: str, model: Model, now: float, dry: bool) -> Session | None:
        """The session of the response that a request goes on from."""
        _, key = self.pins.find(tenant.name, name)
        session = None if key is None else self.sessions.get(key)
        if session is None or session.model != model.name:
            return None
        if not dry:
            self.sessions.touch(session, now)
        return session

    def _carried_home(self, session: Session, seed: int, model: Model, dry: bool) -> int | None:
        """A token tells where a session is at home that is not known here any more, or not yet: the target's id."""
        if session.home is not None or session.turns or session.running or not seed:
            return None
        for target in self.fleet.targets.values():
            if target.seed == seed and target.role is not Role.PREFILL and self.fleet.serves(target.worker, model.name):
                if not dry:
                    self.sessions.bind(session, target.id, "token")
                return target.id
        return None

    def _agreed(self, session: Session) -> int | None:
        """Where other gateways that are not heard would have it at home, too."""
        view = self.fleet.view(session.model)
        return None if view is None or session.turns else rendezvous(session.hash, view.targets).id

    def _lent(self, request: Request, session: Session, ids: bytes, now: float) -> None:
        """What the session's home can hand back of this very prompt."""
        offer = self.offers.fits(session.key, ids, now)
        at = None if offer is None else self.fleet.targets.get(offer.target)
        if offer is not None and at is not None and at.epoch == offer.epoch and request.home == offer.target:
            request.lent = offer.tokens

    def _check_model(self, tenant: Tenant, reading: Reading, model: Model | None) -> None:
        """Raises `Forbidden` if the tenant may not use what this request would use, whatever its body shows of that."""
        allowed = tenant.models or frozenset()
        real = {self.options.real(tenant.called(name)) for name in allowed}
        if reading.opaque and reading.previous is None:
            # What the worker will read in the body is not known: everything that it might is to be allowed.
            names = {served.name for worker in self.fleet.workers.values() for served in worker.facts.models}
        else:
            names = {model.name} if model is not None else set()
        for name in names:
            if name not in allowed and name not in real:
                tenant.check_model(name)

    # -- choosing ---------------------------------------------------------------------------------------------------

    def view(self, ask: Ask, tried: Collection[int], now: float) -> View:
        """The candidates. Raises `NoWorker`."""
        name = ask.model.name if ask.model is not None else None
        view = self.fleet.view(name, tried)
        if view is not None and view.prefill is not None:
            view = self._split(ask, view)
        if view is None:
            stage = self.fleet.lacks(name, tried)
            who = "worker" if stage is None else f"{stage} worker"
            what = f"no {who} that serves {name!r} can be used now" if name else f"no {who} can be used now"
            raise NoWorker(what, retry_after=self.fleet.retry_after(name, now))
        return view

    def _split(self, ask: Ask, view: View) -> View | None:
        """The candidates of a request that some pools can split, and others not."""
        takes, first = ask.takes, view.prefill
        assert first is not None
        if takes is None:
            # Nothing is generated: any of them will do.
            return View(view.targets)
        pools = {target.pool: target for target in first.targets}
        able = set()
        for pool, target in pools.items():
            assert isinstance(target, Target)
            if takes(target.worker.protocol or ""):
                able.add(pool)
        if able == pools.keys():
            return view
        left = [target for target in view.targets if target.whole or target.pool in able]
        stages = [target for target in first.targets if target.pool in able]
        return View(left, View(stages) if stages else None) if left else None

    def other(self, ask: Ask, prefill: Target, tried: Collection[int], now: float) -> Choice | None:
        """Who else may fetch what ``prefill`` computed; ``None`` if nobody can."""
        name = ask.model.name if ask.model is not None else None
        view = self.fleet.view(name, tried)
        able = [target for target in view.targets if target.role is Role.DECODE] if view is not None else []
        able = [target for target in able if target.pool == prefill.pool]
        if not able:
            return None
        choice = self._policy(ask, True).choose(ask.request, View(able, View([prefill])), now)
        return choice._replace(prefill=prefill, source=None)

    def partner_of(self, target: Target, ask: Ask, tried: Collection[int], now: float) -> Target | None:
        """Who computes prompts for ``target``, if it cannot by itself: the least busy. Raises `NoWorker`."""
        if target.whole:
            return None
        view = self.fleet.view(ask.model.name if ask.model is not None else None, tried)
        first = view.prefill.targets if view is not None and view.prefill is not None else ()
        able = [each for each in first if each.pool == target.pool]
        if not able:
            raise NoWorker("no prefill worker can be used now", retry_after=1)
        found = min(able, key=lambda each: (each.waits(now), each.id))
        assert isinstance(found, Target)
        return found

    def _policy(self, ask: Ask, staged: bool) -> Policy:
        """The request's policy; in a fleet of pairs what it does there."""
        return self._paired_policy(ask.policy) if staged else ask.policy

    def _paired_policy(self, policy: Policy) -> Policy:
        found = self._paired.get(id(policy))
        if found is None:
            # The policy is kept with it, so that its id stays its own.
            found = self._paired[id(policy)] = (policy, paired(policy))
        return found[1]

    def choose(self, ask: Ask, tried: Collection[int], now: float) -> Choice:
        """What the policy says. Raises `NoWorker`; changes nothing."""
        self.fleet.settle_estimates(now)
        home = ask.request.home
        stays = None if home is None or home in tried else self._stays(ask, home, tried, now)
        if stays is not None:
            return stays
        view = self.view(ask, tried, now)
        staged = view.prefill is not None
        if ask.model is not None and ask.prefixed:
            computing = view.targets if view.prefill is None else view.prefill.targets
            # Of what others are asked as much is taken to come as here: each has its part of the targets.
            gateways = 1 if self.replicas is None else 1 + len(self.replicas.peers)
            ask.request.crowd = ask.model.demand.crowd(len(computing) / gateways, now)
        ask.request.away = home is not None and home not in view.positions and self.fleet.rests(home, now)
        return (self._policy(ask, True) if staged else ask.policy).choose(ask.request, view, now)

    def rehome(self, session: Session, now: float) -> Target:
        """Where else ``session`` would be at home, if its next turn came now. Raises `NoWorker` where nobody can serve it."""
        model = self.model(session.model)
        ids = [] if session.home is None else [session.home]
        view = self.fleet.view(session.model, ids)
        if view is None:
            raise NoWorker(f"nobody else serves {session.model!r} now")
        request = Request(session.hash, session=session.hash, tokens=session.prompt_tokens)
        tenant = self.tenants.get(session.tenant)
        policies = self.default if tenant is None else self.policies_of(tenant, session.model)
        part = policies.rollout
        policy = part.policy if part is not None and part.has(session.hash) else policies.main
        if model is not None:
            request.turns, request.ordinal = model.demand.turns, model.ordinal
            model.ordinal += 1
        chosen = (self._paired_policy(policy) if view.prefill is not None else policy).choose(request, view, now).target
        assert isinstance(chosen, Target)
        return chosen

    def _stays(self, ask: Ask, home: int, tried: Collection[int], now: float) -> Choice | None:
        """Where a session goes on while its home, or its prefill engine, drains with time; ``None`` if neither does."""
        lingers = self.fleet.lingering(home, now)
        first = ask.request.partner
        helper = None if first is None or first in tried else self.fleet.lingering(first, now)
        if lingers is None and helper is None:
            return None
        partner = None if first is None or first in tried else self.fleet.targets.get(first)
        if helper is None and partner is not None and self.fleet.usable(partner, now):
            helper = partner
        target = lingers or self.fleet.targets.get(home)
        if target is None or (lingers is None and not self.fleet.usable(target, now)):
            return None
        return Choice(target, "home", prefill=helper or self.partner_of(target, ask, tried, now))

    def commit(self, ask: Ask, target: Target, choice: Choice, now: float) -> None:
        """The request is about to be sent to ``target``."""
        model, session, request = ask.model, ask.session, ask.request
        if model is None:
            return
        model.ordinal += 1
        # However often it has to be sent, it is asked once.
        first, ask.asked = not ask.asked, True
        if session is not None:
            if first:
                model.demand.turn(ask.new_session)
                self._returned(ask, session, now)
            self._bind(ask, session, target, choice)
        if request.tokens is not None:
            computes = computing(choice, target)
            held = request.holdings.get(computes.id, 0)
            if choice.source is not None:
                held = max(held, request.lent)
            ask.predicted = ask.context = min(held, request.tokens)
            if first:
                model.demand.sent(computes.rates.prefill(request.tokens - ask.context, ask.context), now)
            self.holdings.note(ask, computes)
            ids = ask.ids is not None
            if self.replicas is not None:
                self.replicas.said.sent(ask, computes)
                if computes is not target and target.worker.facts.keeps:
                    self.replicas.said.sent(ask, target)
            if computes is not target:
                place = self.index.sent(ask.namespace, ask.pages.symbols, computes.id, now, ids)
                ask.second = (place, computes.id)
            if model.fine and ask.ids is not None:
                self.holdings.sequels.put(names(ask.pages.symbols), ask.ids, ask.start)
            if session is not None:
                session.sent, session.sent_to = now, computes.id
            ask.committed = now
            if target.worker.facts.keeps:
                ask.pin = (self.index.sent(ask.namespace, ask.pages.symbols, target.id, now, ids), target.id)

    def _returned(self, ask: Ask, session: Session, now: float) -> None:
        """Learn how long its session was away, and with what."""
        if not session.turns:
            return
        tool = ask.reading.tool() if ask.reading.tool is not None else None
        session.tool = (tool or "")[:TOOL_NAME]
        self.returning.came(session, session.tool, now)

    def _bind(self, ask: Ask, session: Session, target: Target, choice: Choice) -> None:
        before = session.home
        session.running += 1
        session.live = (*session.live, ask) if session.live else (ask,)
        if before is None or choice.moves_home:
            self.sessions.bind(session, target.id, choice.reason)
        first = choice.prefill
        if first is not None and first.id != session.partner and (session.partner is None or not ask.request.siblings):
            ask.partnered = (session.partner, first.id)
            self.sessions.bind_partner(session, first.id)
        if before == target.id:
            outcome = "hit"
        elif before is None:
            outcome = "new" if ask.new_session else "lost"
        else:
            outcome = "moved" if choice.moves_home else "spilled"
        self.metrics.sessions.add((ask.tenant.name, ask.model_name, outcome, choice.reason))

    def begun(self, ask: Ask, good: bool = True) -> None:
        """The answer begins: what was needed to choose again may go, and only what is learned at the end stays. ``good``: it is
        none of an error."""
        reading = ask.reading
        reading.ids = reading.salt = reading.tool = ask.takes = None
        reading.session, reading.field = tuple, no_field
        if ask.ids is not None and not ask.returns and (ask.model is None or ask.model.rule is None):
            ask.ids = b""
        prompt = ask.prompt
        if prompt is not None:
            if ask.found == "content" and good and ask.session is not None:
                # Not at the end: its client may go on before the last byte of the framing is here.
                said = end_of(prompt, ask.scope)
                if said is not None:
                    self.sessions.remember_content(ask.session, said)
            ask.prompt = None
        ask.reading.make_prompt = None

    def undo(self, ask: Ask, target: Target) -> None:
        """The request did not run on ``target`` after all: believe what was believed before."""
        session = ask.session
        if session is not None:
            session.running = max(0, session.running - 1)
            session.live = _without(session.live, ask)
        for place, at in (pin for pin in (ask.pin, ask.second) if pin is not None):
            self.index.undone(ask.namespace, ask.pages.symbols, at, place, ask.depth.get(at, 0), ask.committed)
        ask.pin = ask.second = None
        if session is not None and session.home == target.id and ask.request.home != target.id:
            self.sessions.unbind(session)
            if ask.request.home is not None:
                self.sessions.bind(session, ask.request.home, "undone")
        bound, ask.partnered = ask.partnered, None
        if session is not None and bound is not None and session.partner == bound[1]:
            self.sessions.bind_partner(session, bound[0] if bound[0] in self.fleet.targets else None)

    # -- learning ---------------------------------------------------------------------------------------------------

    def prefilled(self, ask: Ask, target: Target, now: float) -> None:
        """``target`` computed the prompt for another, and holds it."""
        if ask.second is not None:
            place, at = ask.second
            self.index.landed(ask.namespace, ask.pages.symbols, at, place, ask.committed, now)
            ask.second = None

    def settle(
        self,
        ask: Ask,
        target: Target,
        usage: Usage | None,
        now: float,
        said: bytes | None = None,
        computes: Target | None = None,
    ) -> None:
        """The request was answered; ``usage`` is what the engine reported, if it did, and ``said`` the answer's token ids.

        ``computes``: who computed the prompt, if that was not ``target``, which reports the cached tokens of the other then.
        """
        session, model = ask.session, ask.model
        computes = computes or target
        self.prefilled(ask, computes, now)
        if ask.pin is not None:
            place, at = ask.pin
            self.index.landed(ask.namespace, ask.pages.symbols, at, place, ask.committed, now)
            ask.pin = None
        if session is not None:
            session.running = max(0, session.running - 1)
            session.turns += 1
            session.ended = now
            session.live = _without(session.live, ask)
        size = ask.size
        if model is None or size is None:
            self._turned(session, now)
            return
        if usage is not None and usage.prompt is not None:
            cached = ask.context if usage.cached is None else usage.cached
            new, made = max(0, usage.prompt - cached), usage.completion or 0
            if computes is not target:
                computes.inflow.add(new, now)
                new = 0
            target.inflow.add(new + made, now)
            if session is not None:
                session.hits = (*session.hits[1 - KEPT :], (usage.prompt, usage.cached))
        if usage is not None and usage.cached is not None and ask.predicted is not None and usage.prompt:
            self.holdings.report(ask, computes, ask.predicted, usage.cached, usage.prompt, now)
        if usage is not None and usage.prompt and size >= TEXT_PAGE and ask.ids is None:
            self.holdings.teach(model, size / usage.prompt)
        if model.rule is not None:
            self.holdings.checkpoint(ask, computes, model.rule, usage)
        if session is None:
            return
        keeps = target.worker.facts.keeps
        if said is not None and ask.ids and keeps:
            ask.pages = self.holdings.said(ask, target, ask.ids + said[:-4], now)
        if ask.body is not None:
            self._compare(ask, session)
        self.sessions.keep_pages(session, ask.pages)
        if session.namespace != ask.namespace:
            session.namespace = ask.namespace
        session.prompt_bytes = size
        session.prompt_tokens = usage.prompt if usage is not None else None
        if session.prompt_tokens is None and ask.ids is not None:
            session.prompt_tokens = ask.request.tokens
        # Of the last token that was sampled nothing was computed.
        session.tail_tokens = max(0, (usage.completion or 0) - 1) if usage is not None else 0
        session.tail_target = target.id if keeps else None
        # Of a pair only the events of the one that computed were asked for.
        told = ask.stored is not None and computes is target
        session.awaits = (ask.stored or 0) + blocks_of(usage, target) if told else 0
        self._turned(session, now)

    def _turned(self, session: Session | None, now: float) -> None:
        """A turn ended, and all that is known of it is in its session."""
        if session is not None and self.sessions.turned is not None:
            self.sessions.turned(session, now)

    def _compare(self, ask: Ask, session: Session) -> None:
        """How far its prompt goes on from the session's previous one."""
        before, symbols = session.pages.symbols, ask.pages.symbols
        if session.prompt_tokens is not None:
            ask.before = session.prompt_tokens + session.tail_tokens
        # What ran beside it, or is of another mode, is no predecessor.
        if not before or session.running or ask.request.siblings or session.namespace != ask.namespace:
            return
        if not symbols.startswith(before):
            ask.shared = int(common(before, symbols) * ask.page)

    # -- the dry run ------------------------------------------------------------------------------------------------

    def explain(
        self,
        ask: Ask,
        now: float,
        pinned: Choice | None = None,
        breaks: Callable[[Session], list[dict[str, object]] | None] | None = None,
    ) -> dict[str, object]:
        """What would be chosen and why; changes nothing. ``pinned``: the choice that is not the policy's to make. ``breaks``:
        where a session's prompts broke from those before, if anybody looks."""
        view = self.view(ask, (), now)
        choice = pinned or self.choose(ask, (), now)
        staged = view.prefill is not None
        rows = self._policy(ask, staged).explain(ask.request, view, now)
        session = ask.session
        other = None if ask.shadowed is None else ask.shadowed.choose(ask.request, view, now) if not staged else None
        return {
            "decision": ask.policy.name,
            "shadow": None
            if other is None or ask.shadowed is None
            else _shadowed(ask, ask.shadowed, choice, other, now),
            "reason": choice.reason,
            "target": choice.target.name,
            "pair": None
            if choice.prefill is None
            else {
                "prefill": choice.prefill.name,
                "decode": choice.target.name,
                "kv_from": None if choice.source is None else choice.source.name,
            },
            "model": ask.model_name,
            "prompt_tokens": ask.request.tokens,
            **_evidence(ask),
            "session": None if session is None else self._story(ask, session, now, breaks),
            "candidates": [
                {
                    "target": row.target.name,
                    **({} if not staged else self._stage(ask, row)),
                    "total_ms": None if row.terms is None else round(row.terms.total * 1e3, 3),
                    "terms": None
                    if row.terms is None
                    else {name: round(value * 1e3, 3) for name, value in row.terms._asdict().items()},
                    "holding_tokens": _by_tier(ask.request, row.target.id, row.holding),
                    "running": row.target.running,
                    "homes": row.target.homes,
                    **self._belief(row.target.id),
                }
                for row in rows
            ],
        }

    def _story(
        self, ask: Ask, session: Session, now: float, breaks: Callable[[Session], list[dict[str, object]] | None] | None
    ) -> dict[str, object]:
        return {
            "id": session.key.hex(),
            "source": ask.found,
            "home": self._name(session.home),
            "why": session.why or None,
            "partner": self._name(session.partner),
            "turns": session.turns,
            "running": session.running,
            "idle_seconds": round(max(0.0, now - session.used), 3) if session.turns else None,
            "returns": self.forecast(session, now),
            "breaks": None if breaks is None else breaks(session),
        }

    def _belief(self, target: int) -> dict[str, object]:
        """What its holdings are taken from, and why."""
        trust = self.index.of(target)
        return {"rung": trust.rung.value, "rung_reason": trust.reason}

    def _stage(self, ask: Ask, row: Candidate) -> dict[str, object]:
        """Who would compute the prompt for a candidate, what it holds of it, and why that is believed."""
        first = row.prefill
        if first is None:
            return dict.fromkeys(("prefill", "prefill_holding_tokens", "prefill_rung", "prefill_rung_reason"))
        request = ask.request
        held = _by_tier(request, first.id, request.holdings.get(first.id, 0))
        belief = {f"prefill_{name}": value for name, value in self._belief(first.id).items()}
        return {"prefill": first.name, "prefill_holding_tokens": held, **belief}

    def forecast(self, session: Session, now: float) -> dict[str, object] | None:
        """Whether the session's KV will survive at its home until its next turn; ``None`` where it has no home."""
        home = None if session.home is None else self.fleet.targets.get(session.home)
        if home is None:
            return None
        return self.returning.forecast(session, home, now, self.options.kv_bytes.get(session.model))

    def says_of(self, target: Target) -> str | None:
        """One sentence where the target's cache is too small for the sessions that will return to it."""
        model = target.worker.facts.models[0].name if target.worker.facts.models else ""
        return self.returning.says_of(target, self.fleet.clock(), self.options.kv_bytes.get(model))

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name


def _share_out(ask: Ask, policies: Policies) -> None:
    """Who routes it, and who is asked beside."""
    ask.prefixed = policies.needs_prefix
    rollout, shadow = policies.rollout, policies.shadow
    if rollout is not None and rollout.has(ask.request.draw if ask.session is None else ask.session.hash):
        ask.policy = rollout.policy
    if shadow is not None and shadow.has(ask.request.draw):
        ask.shadowed = shadow.policy


def _without(live: tuple[Ask, ...], ask: Ask) -> tuple[Ask, ...]:
    return () if len(live) < 2 else tuple([each for each in live if each is not ask])


def common(one: bytes, other: bytes) -> int:
    """Leading symbols that both have."""
    low, high = 0, min(len(one), len(other)) // SYMBOL
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low * SYMBOL : middle * SYMBOL], low * SYMBOL):
            low = middle
        else:
            high = middle - 1
    return low


def computing(choice: Choice, target: Target) -> Target:
    """Who computes the prompt: ``target``, or its prefill engine."""
    if choice.prefill is None:
        return target
    assert isinstance(choice.prefill, Target)
    return choice.prefill


def _shadowed(ask: Ask, shadow: Policy, made: Choice, other: Choice, now: float) -> dict[str, object]:
    """What another policy would do, beside what is done."""
    seconds, tokens = regret(ask.request, made, other, now)
    return {
        "policy": shadow.name,
        "target": other.target.name,
        "agrees": other.target is made.target,
        "saves_ms": round(seconds * 1e3, 3),
        "saves_tokens": tokens,
    }


def _evidence(ask: Ask) -> dict[str, object]:
    """What the index says of the prompt; ``None``: it was not asked. A prompt as ``text`` is not compared with events."""
    if not ask.prefixed or ask.size is None:
        return {"mode": None, "best_tokens": None, "seen_tokens": None}
    best = max(ask.request.holdings.values(), default=0)
    mode = "text" if ask.ids is None else "ids"
    return {"mode": mode, "best_tokens": best, "seen_tokens": max(best, ask.ceiling)}


def _by_tier(request: Request, target: int, tokens: int) -> dict[str, int]:
    """Where what a target can use of the prompt is now."""
    told = request.restored.get(target)
    peer = request.fetched.get(target, 0)
    found = {"device": max(0, tokens - peer - sum(told or ()))}
    if told is not None:
        found["host"], found["disk"], found["shared"] = told
    if peer:
        found["peer"] = peer
    return found


def draw_of(request_id: bytes) -> int:
    """64 bits from a request's id."""
    return xxh3_64_intdigest(request_id)
