"""What targets are predicted to hold of a request's prompt, and what its answer teaches about that.

The index tells pages, by text or by token ids; here they become tokens that can be reused: never the last one, true to the
engine's blocks and to where a hybrid model can be resumed, with what was generated behind the session's last prompt.
"""

import logging
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from gateway.asks import BY_IDS, BYTES_PER_TOKEN, Ask, Model, Options
from gateway.dialects import Usage
from gateway.engines.events import namespace
from gateway.fleet import Fleet
from gateway.prompt import Prompt
from gateway.sessions import Session
from gateway.workers import State, Target, Worker
from kv_index.checkpoints import Checkpoints, Rule
from kv_index.heard import Heard, seed_of
from kv_index.index import DOUBTED, PrefixIndex, Report
from kv_index.pages import PAGE_TOKENS, SYMBOL, TEXT_PAGE, Pages, chain, names, paginate
from kv_index.sequels import Sequels
from policies.base import Request, Role

log = logging.getLogger("warmroute")

PREFIX_PAGES = 4
"""Pages of a prompt's start that `prefix_hash` hashes: about a kilobyte."""

LEARNING = 0.05

LEAST_FETCHED = 64
"""Tokens that are not worth a transfer: engines compute them."""

LAG = 0.25
"""Seconds after an answer within which events of its last tokens may be on their way."""


class Holdings:
    """See the module's head. ``models`` are those of `gateway.routing`."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, options: Options, models: Mapping[str, Model]) -> None:
        self.fleet = fleet
        self.index = index
        self.options = options
        self.models = models
        self.checkpoints = Checkpoints()
        self.sequels = Sequels()
        self.heard: Heard | None = None
        """What other gateways sent, if there are any."""
        self.reaching = False
        """Whether some workers share a store, or can fetch from each other."""

    # -- predicting ------------------------------------------------------------------------------------------------------

    def match(self, ask: Ask, prompt: Prompt, model: Model) -> None:
        session, request = ask.session, ask.request
        size = len(prompt.text)
        ask.pages = pages = paginate(prompt.text, session.pages if session is not None else None)
        symbols = pages.symbols
        if len(symbols) >= PREFIX_PAGES * SYMBOL:
            request.prefix = xxh3_64_intdigest(symbols[: PREFIX_PAGES * SYMBOL])
        _, depth, seen = self.index.radix.match(ask.namespace, symbols)
        if self.heard is not None:
            told = self._hear(ask, symbols, depth, False)
            if told:
                depth = {**depth, **told}
                seen = max(seen, *told.values())
        ask.depth = depth
        tokens = size / model.bytes_per_token
        if session is not None and session.prompt_tokens is not None and size >= session.prompt_bytes:
            tokens = session.prompt_tokens + (size - session.prompt_bytes) / model.bytes_per_token
        count = request.tokens = max(1, int(tokens))
        scale = ask.page = TEXT_PAGE * count / (size or 1)
        most = count - 1
        ask.ceiling = min(int(seen * scale), most)
        if depth:
            # Many hold the same shared start: as few conversions as there are depths.
            counts = {pages: min(int(pages * scale), most) for pages in set(depth.values())}
            if len(counts) == 1:
                holdings = dict.fromkeys(depth, counts.popitem()[1])
            else:
                holdings = {target: counts[pages] for target, pages in depth.items()}
            if self.index.low:
                for target in [target for target in self.index.low if target in holdings]:
                    if not self.index.believed(target, request.home):
                        del holdings[target]
            if model.rule is not None:
                along = prefixes_of_text(symbols)
                holdings = self.checkpoints.usable(along, holdings, page=scale)
            if session is not None and session.tail_target is not None:
                self._open_tail(ask, session, depth, holdings, most)
            request.holdings = holdings
            if self.reaching:
                self._reach(request, count)
        elif session is not None and session.tail_target is not None:
            self._open_tail(ask, session, depth, {}, most)

    def match_ids(self, ask: Ask, ids: bytes, model: Model, now: float) -> None:
        """The same by token ids: exact counts, exact where events tell, true to the engines' blocks."""
        session, request = ask.session, ask.request
        ask.start = namespace(model.adapter, ask.salt)
        ask.page = float(PAGE_TOKENS)
        ask.namespace += BY_IDS
        ask.pages = pages = chain(ids, ask.start, session.pages if session is not None else None)
        symbols = pages.symbols
        if len(symbols) >= PREFIX_PAGES * SYMBOL:
            request.prefix = xxh3_64_intdigest(symbols[: PREFIX_PAGES * SYMBOL])
        count = request.tokens = max(1, len(ids) // 4)
        found = self.index.match(ask.namespace, symbols, ids, ask.start, request.home, events=not ask.reading.apart)
        ask.depth, ask.exact, ask.ceiling = found.depths, found.exact, min(found.seen, count - 1)
        held = found.tokens
        if self.heard is not None:
            self._hear_ids(ask, symbols, found.depths, held, count - 1)
        if model.fine:
            self._to_the_token(ask, held, names(symbols), ids)
        if model.rule is not None and held:
            # What events tell of all groups of a hybrid model's caches is usable as it is.
            blocks = self.index.blocks
            told = {target: found.exact[target] for target in held if target in found.exact and blocks.grouped(target)}
            held = {**self.checkpoints.usable(names(symbols), held, ids, most=count - 1), **told}
        if session is not None and session.tail_target is not None:
            at = self.index.trust.get(session.tail_target)
            # What events do not tell by then is not there.
            late = at is not None and at.stored < session.awaits and now - session.ended < LAG
            exact = at is not None and at.exact and not late
            self._open_tail(ask, session, {} if exact else found.depths, held, count - 1)
        request.restored = found.restored
        if model.rule is not None:
            # States are where they are.
            request.holdings = held
        else:
            request.holdings = {target: self._usable(target, tokens, count) for target, tokens in held.items()}
            if self.reaching:
                self._reach(request, count)

    def _hear(self, ask: Ask, symbols: bytes, depth: Mapping[int, int], chained: bool) -> dict[int, int]:
        """target -> pages, where other gateways sent more of the prompt than was sent from here."""
        assert self.heard is not None
        home = ask.request.home
        known = 0 if home is None else depth.get(home, 0)
        found = self.heard.match(symbols, seed_of(ask.namespace), chained, known, home)
        more = {target: pages for target, pages in found.items() if pages > depth.get(target, 0)}
        if more:
            ask.own = {target: depth.get(target, 0) for target in more}
        return more

    def _hear_ids(self, ask: Ask, symbols: bytes, depths: Mapping[int, int], held: dict[int, int], most: int) -> None:
        """The same of a prompt of token ids: no news of targets whose events tell all."""
        told = self._hear(ask, symbols, depths, True)
        if not told:
            return
        ask.depth = {**depths, **told}
        ask.ceiling = max(ask.ceiling, min(most, max(told.values()) * PAGE_TOKENS))
        for target, pages in told.items():
            trust = self.index.of(target)
            if self.index.believed(target, ask.request.home) and not (trust.exact and trust.whole):
                held[target] = max(held.get(target, 0), pages * PAGE_TOKENS)

    def _reach(self, request: Request, count: int) -> None:
        """What targets do not hold, but can get: out of a store that their pool writes to, or from the session's home."""
        targets = self.fleet.targets
        holdings, restored = dict(request.holdings), dict(request.restored)
        stored: dict[str, int] = {}
        for id_, held in holdings.items():
            at = targets.get(id_)
            if at is not None and at.worker.stores:
                stored[at.pool] = max(stored.get(at.pool, 0), held)
        home = None if request.home is None else targets.get(request.home)
        lends = home is not None and home.worker.spec.source is not None and home.worker.state is State.READY
        most = holdings.get(home.id, 0) if home is not None and lends else 0
        fetched: dict[int, int] = {}
        for id_, at in targets.items():
            held = holdings.get(id_, 0)
            more = stored.get(at.pool, 0) - held if at.worker.stores else 0
            if more > 0:
                host, disk, shared = restored.get(id_, (0, 0, 0))
                restored[id_], holdings[id_] = (host, disk, shared + more), held + more
                continue
            more = most - held
            if more >= LEAST_FETCHED and at.worker.spec.source is not None and at.role is not Role.PREFILL:
                saved = at.rates.prefill(count - held, held) - at.rates.prefill(count - most, most)
                if at.rates.moved(more) < saved:
                    fetched[id_], holdings[id_] = more, most
        request.holdings, request.restored, request.fetched = holdings, restored, fetched

    def _share(self, model: Model, ids: float) -> None:
        """Pages of ids hold fewer tokens than pages of text: how many a cache has depends on which there are."""
        model.by_ids += 0.1 * (ids - model.by_ids)
        if abs(model.by_ids - model.fitted) > 0.1:
            model.fitted = model.by_ids
            self.fit_capacities()

    def _to_the_token(self, ask: Ask, held: dict[int, int], along: Sequence[int], ids: bytes) -> None:
        """Where pages are known and engines cache token by token."""
        behind: dict[int, int] = {}
        for target, tokens in held.items():
            if tokens % PAGE_TOKENS or ask.exact.get(target, 0) >= tokens:
                continue
            pages = tokens // PAGE_TOKENS
            if pages not in behind:
                behind[pages] = self.sequels.beyond(along, pages, ids, ask.start)
            held[target] = tokens + behind[pages]

    def _usable(self, target: int, held: int, count: int) -> int:
        """Never the last token, and whole blocks of that engine."""
        at = self.fleet.targets.get(target)
        block = (at.worker.facts.block_size if at is not None else None) or 1
        return min(held, count - 1) // block * block

    def _open_tail(
        self,
        ask: Ask,
        session: Session,
        depth: Mapping[int, int],
        holdings: dict[int, int],
        most: int,
    ) -> None:
        """Count what was generated after the session's last prompt, where this one goes on from there."""
        at = session.tail_target
        symbols, before = ask.pages.symbols, session.pages.symbols
        if (
            at is None
            or ask.model is None
            or session.prompt_tokens is None
            or not 0 < len(before) < len(symbols)
            or not symbols.startswith(before)
        ):
            return
        tail, rule = session.prompt_tokens + session.tail_tokens, ask.model.rule
        if rule is not None:
            tail = rule.resumed(session.prompt_tokens, session.tail_tokens)
            tail = tail if tail <= most else 0
        tail = min(tail, most)
        ask.ceiling = max(ask.ceiling, tail)
        if tail and depth.get(at, 0) * SYMBOL >= len(before) and self.index.believed(at, at):
            holdings[at] = max(holdings.get(at, 0), tail)

    # -- learning --------------------------------------------------------------------------------------------------------

    def note(self, ask: Ask, target: Target) -> None:
        """What else could have been predicted of ``target``: the answer will tell who was right."""
        session, id_ = ask.session, target.id
        assert ask.predicted is not None
        if ask.model is not None and (ask.ids is not None or ask.model.by_ids):
            self._share(ask.model, float(ask.ids is not None))
        ask.routed = max(ask.predicted, int(ask.depth.get(id_, 0) * ask.page))
        trust = self.index.trust.get(id_)
        if trust is not None and trust.fed:
            if ask.ids is None:
                self._tell_useless(ask.model)
            elif not ask.reading.apart:
                ask.stored = trust.stored
                ask.shadow = self._usable(id_, ask.exact.get(id_, 0), ask.request.tokens or 1)
                ask.routed = int(ask.depth.get(id_, 0) * ask.page)
        ask.used = session.sent if session is not None and session.sent_to == id_ else None

    def _tell_useless(self, model: Model | None) -> None:
        if model is not None and not model.told and model.name not in self.options.by_ids:
            model.told = True
            log.warning(
                "engines of %s publish KV events, but its prompts are routed by text, which events cannot be compared "
                "with: what their caches hold stays predicted (cure: models.%s.tokenizer and .template)",
                model.name,
                model.name,
            )

    def said(self, ask: Ask, target: Target, ids: bytes, now: float) -> Pages:
        """What was generated is known to the token: it is held, and no open tail."""
        pages = chain(ids, ask.start, ask.pages)
        if target.id not in self.fleet.targets:
            return pages
        self.index.radix.insert(ask.namespace, pages.symbols, target.id, now)
        if ask.model is not None and ask.model.fine:
            self.sequels.put(names(pages.symbols), ids, ask.start)
        return pages

    def report(self, ask: Ask, target: Target, predicted: int, cached: int, prompt: int, now: float) -> None:
        """Have what is believed of ``target`` corrected by what it found in its cache."""
        trust = self.index.trust.get(target.id)
        if trust is not None and -DOUBTED <= predicted - cached <= DOUBTED and trust.quiet:
            return
        session = ask.session
        told = Report(
            predicted,
            cached,
            prompt,
            ask.routed,
            ask.shadow,
            session is not None and ask.request.home == target.id,
            ask.used,
            ask.page or float(PAGE_TOKENS),
            target.worker.facts.block_size or PAGE_TOKENS,
        )
        self.index.report(target.id, told, now)

    def checkpoint(self, ask: Ask, target: Target, rule: Rule, usage: Usage | None) -> None:
        """Its engine kept states along this prompt."""
        count = usage.prompt if usage is not None and usage.prompt else ask.request.tokens
        if count is None:
            return
        along = names(ask.pages.symbols) if ask.ids is not None else prefixes_of_text(ask.pages.symbols)
        page = float(PAGE_TOKENS) if ask.ids is not None else TEXT_PAGE * count / (ask.size or 1)
        # However many tokens it may say that there were.
        count = min(count, int(len(along) * page) + PAGE_TOKENS)
        for tokens in rule.positions(count, target.worker.facts.block_size or PAGE_TOKENS, ask.routed):
            self.checkpoints.put(target.id, along, tokens, ask.ids or b"", page)

    def teach(self, model: Model, ratio: float) -> None:
        """Bytes a token, as one request shows it; capacities follow."""
        if not 0.5 <= ratio <= 64:
            return
        model.taught += 1
        weight = max(LEARNING, 1.0 / model.taught)
        model.bytes_per_token += weight * (ratio - model.bytes_per_token)
        if model.taught & (model.taught - 1) == 0 or model.taught % 256 == 0:
            self.fit_capacities()

    # -- what is known of workers ----------------------------------------------------------------------------------------

    def described(self, worker: Worker) -> None:
        """What is known of ``worker`` changed."""
        listed = [served.name for served in worker.facts.models]
        for name in listed or list(self.models):
            if name in self.models:
                self.describe(self.models[name])
        workers = self.fleet.workers.values()
        self.reaching = any(each.stores or each.spec.source is not None for each in workers)
        told = self.options.restore.get(listed[0]) if listed else None
        for target in worker.targets:
            if told is not None and not target.calibration.restores:
                target.calibration.rates.restore = told
            self._fit(target)

    def describe(self, model: Model) -> None:
        """What its workers say of it."""
        workers = self.fleet.serving(model.name)
        model.rule = self._rule_of(model.name, workers)
        sizes = [worker.facts.block_size for worker in workers]
        model.fine = any(size is not None and size < PAGE_TOKENS for size in sizes)
        listed = [served for worker in workers for served in worker.facts.models]
        model.adapter = model.name if any(s.name == model.name and s.parent is not None for s in listed) else None

    def _rule_of(self, name: str, workers: Sequence[Worker]) -> Rule | None:
        """Where engines can resume a prompt, if its model is hybrid."""
        options = self.options
        if name not in options.hybrid and (name in options.anywhere or not any(w.facts.hybrid for w in workers)):
            return None
        by_kind = Rule(boundary=True) if {worker.facts.engine for worker in workers} <= {"vllm"} else Rule(ends=True)
        return options.rules.get(name) or by_kind

    def fit_capacities(self) -> None:
        """Tell the index how many pages each engine's cache is."""
        for worker in self.fleet.workers.values():
            for target in worker.targets:
                self._fit(target)

    def _fit(self, target: Target) -> None:
        facts = target.worker.facts
        known = self.models.get(facts.models[0].name) if facts.models else None
        ratio = known.bytes_per_token if known is not None else BYTES_PER_TOKEN
        tokens = facts.kv_tokens
        share = known.fitted if known is not None else 0.0
        page = share * PAGE_TOKENS + (1 - share) * TEXT_PAGE / ratio
        self.index.set_size(target.id, None if tokens is None else int(tokens / page))


def blocks_of(usage: Usage | None, target: Target) -> int:
    """Blocks that ``target`` stores for a request with that usage."""
    if usage is None or usage.prompt is None:
        return 0
    size = target.worker.facts.block_size or PAGE_TOKENS
    return (usage.prompt + (usage.completion or 0) - 1) // size - (usage.cached or 0) // size


def prefixes_of_text(symbols: bytes) -> list[int]:
    """Names of the prefixes of a prompt of text: its symbols say nothing of what stands before them."""
    found, before = [], 0
    for at in range(0, len(symbols), SYMBOL):
        before = xxh3_64_intdigest(symbols[at : at + SYMBOL], before)
        found.append(before)
    return found
