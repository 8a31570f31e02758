"""What the simulated gateway believes that engines hold, and what answers and events teach it: `gateway.holdings` on blocks.

To the index a block of the traffic is one page: by its id where prompts are text, by sixteen token ids that stand for it
where engines' events are compared.
"""

from collections.abc import Collection, Mapping, Sequence
from struct import pack

from xxhash import xxh3_64_intdigest

from kv_index.blocks import BlockIndex
from kv_index.checkpoints import Checkpoints
from kv_index.groups import Tier
from kv_index.index import DOUBTED, PrefixIndex, Report
from kv_index.pages import PAGE_TOKENS, SYMBOL, chain, names
from kv_index.radix import RadixIndex
from load_tests.simulate.cache import Move
from load_tests.simulate.engine import Options
from load_tests.simulate.places import Asking, Sent, Session
from load_tests.simulate.traffic import Turn

START_TOKENS = 256
"""Tokens of a prompt's start that `prefix_hash` hashes: about a kilobyte."""

NAMESPACE = b"simulated"

LAG = 0.25
"""Seconds after an answer within which events of its last tokens may be on their way, as the gateway has it."""


class Beliefs:
    """``told``: engines whose events are heard; nobody: prompts are matched as text. ``answers``: whether a session's next
    prompt carries the answer before it, as chats do."""

    def __init__(self, workers: int, options: Options, told: Collection[int], answers: bool) -> None:
        self.options = options
        self.block = options.block
        self.answers = answers
        self.index = PrefixIndex(RadixIndex(), BlockIndex())
        self.checkpoints = Checkpoints()
        self.ids = bool(told)
        for target in range(workers):
            self.index.set_size(target, options.kv_tokens // options.block)
        for target in told:
            self.listen(target)

    def listen(self, target: int) -> None:
        """Its events are heard from now on, since it held nothing."""
        self.index.fed(target, PAGE_TOKENS)
        self.index.heard(target, True, False)

    # -- predicting -------------------------------------------------------------------------------------------------

    def match(
        self, request: Asking, turn: Turn, session: Session | None, now: float
    ) -> tuple[bytes, Mapping[int, int]]:
        """Fill in what targets are believed to hold; returns the prompt's symbols, and the depths of what was routed."""
        ids = pages(turn.blocks) if self.ids else b""
        symbols = chain(ids).symbols if self.ids else pack(f"<{len(turn.blocks)}Q", *turn.blocks)
        start = max(1, START_TOKENS // self.block) * SYMBOL
        if len(symbols) >= start:
            request.prefix = xxh3_64_intdigest(symbols[:start])
        request.tokens = turn.tokens
        most = turn.tokens - 1
        exact: Mapping[int, int] = {}
        if self.ids:
            found = self.index.match(NAMESPACE, symbols, ids, 0, request.home)
            depths, exact = found.depths, found.exact
            scale = self.block // PAGE_TOKENS if self.block % PAGE_TOKENS == 0 else self.block / PAGE_TOKENS
            holdings = {target: min(int(tokens * scale), most) for target, tokens in found.tokens.items()}
            request.restored = {
                target: (int(host * scale), int(disk * scale), int(shared * scale))
                for target, (host, disk, shared) in found.restored.items()
            }
        else:
            depths = self.index.radix.match(NAMESPACE, symbols).depths
            if not depths:
                return symbols, depths
            tokens = {blocks: min(blocks * self.block, most) for blocks in set(depths.values())}
            holdings = {target: tokens[blocks] for target, blocks in depths.items()}
            for target in [target for target in self.index.low if target in holdings]:
                if not self.index.believed(target, request.home):
                    del holdings[target]
        if self.options.states is not None:
            holdings = self.checkpoints.usable(names(symbols), holdings, page=float(self.block))
        if session is not None and session.tail_at is not None:
            at = self.index.trust.get(session.tail_at)
            late = at is not None and at.stored < session.awaits and now - session.ended < LAG
            if at is None or not at.exact or late:
                self._open_tail(session, symbols, depths, holdings, most)
        request.holdings = holdings
        request.exact = {target: int(tokens * self.block / PAGE_TOKENS) for target, tokens in exact.items()}
        return symbols, depths

    def _open_tail(
        self, session: Session, symbols: bytes, depths: Mapping[int, int], holdings: dict[int, int], most: int
    ) -> None:
        """What was generated behind the session's last prompt is held too, where this one goes on from there."""
        at, before = session.tail_at, session.symbols
        if (
            at is not None
            and session.tokens is not None
            and len(symbols) > len(before) > 0
            and depths.get(at, 0) * SYMBOL >= len(before)
            and symbols.startswith(before)
            and self.index.believed(at, at)
        ):
            held = session.tokens + session.tail
            if self.options.states is not None:
                held = self.options.states.resumed(session.tokens, session.tail)
            # Engines find whole blocks.
            tail = held // self.block * self.block
            if tail:
                holdings[at] = max(holdings.get(at, 0), min(tail, most))

    # -- requests ---------------------------------------------------------------------------------------------------

    def sent(self, sent: Sent, request: Asking, now: float) -> None:
        """The prompt is on its way to its target, where ``request.holdings`` were predicted."""
        target = sent.target
        held = min(request.holdings.get(target, 0), sent.turn.tokens)
        sent.predicted = held
        sent.routed = max(held, sent.depths.get(target, 0) * self.block)
        trust = self.index.trust.get(target)
        if trust is not None and trust.fed:
            sent.stored = trust.stored
            sent.shadow = min(request.exact.get(target, 0), sent.turn.tokens - 1) // self.block * self.block
            sent.routed = sent.depths.get(target, 0) * self.block
        sent.pin = self.index.sent(NAMESPACE, sent.symbols, target, now, self.ids)
        if sent.decoder is not None:
            sent.second = self.index.sent(NAMESPACE, sent.symbols, sent.decoder, now, self.ids)
        if sent.session is not None:
            sent.used = sent.session.sent if sent.session.sent_to == target else None
            sent.session.sent, sent.session.sent_to = now, target

    def undone(self, sent: Sent) -> None:
        """It did not run there after all."""
        if sent.pin is not None:
            depth = sent.depths.get(sent.target, 0)
            self.index.undone(NAMESPACE, sent.symbols, sent.target, sent.pin, depth, sent.at)
            sent.pin = None

    def ended(self, sent: Sent, cached: int, now: float) -> None:
        """The answer is complete, and says how much of the prompt was ``cached``."""
        turn, session = sent.turn, sent.session
        if sent.pin is not None:
            self.index.landed(NAMESPACE, sent.symbols, sent.target, sent.pin, sent.at, now)
        if sent.second is not None and sent.decoder is not None:
            self.index.landed(NAMESPACE, sent.symbols, sent.decoder, sent.second, sent.at, now)
        if sent.predicted is not None:
            self._report(sent, sent.predicted, cached, now)
            if self.options.states is not None:
                along = names(sent.symbols)
                for tokens in self.options.states.positions(turn.tokens, self.block, sent.routed):
                    self.checkpoints.put(sent.target, along, tokens, page=float(self.block))
        if session is not None:
            session.symbols, session.tokens = sent.symbols, turn.tokens
            session.tail = max(0, turn.output - 1) if self.answers else 0
            generated = sent.target if sent.decoder is None else sent.decoder
            session.tail_at = generated if self.answers else None
            session.ended = now
            made = (turn.tokens + turn.output - 1) // self.block - cached // self.block
            session.awaits = sent.stored + made if sent.stored is not None and sent.decoder is None else 0

    def _report(self, sent: Sent, predicted: int, cached: int, now: float) -> None:
        trust = self.index.trust.get(sent.target)
        if trust is not None and -DOUBTED <= predicted - cached <= DOUBTED and trust.quiet:
            return
        at_home = sent.session is not None and sent.home_before == sent.target
        page = float(self.block)
        told = Report(
            predicted, cached, sent.turn.tokens, sent.routed, sent.shadow, at_home, sent.used, page, self.block
        )
        self.index.report(sent.target, told, now)

    # -- engines ----------------------------------------------------------------------------------------------------

    def filled(self, target: int) -> float:
        """Share of its cache that is believed to be in use."""
        return self.index.radix.pages(target) * self.block / self.options.kv_tokens

    def heard(self, target: int, told: Sequence[Move]) -> None:
        """Events of ``target``."""
        blocks = self.index.blocks
        stored = 0
        for move in told:
            tier = Tier.HOST if move.host else Tier.DEVICE
            if not move.stored:
                blocks.remove(target, move.ids, tier)
            elif move.host:
                blocks.store(target, move.ids, None, (), PAGE_TOKENS, tier=tier)
            else:
                stored += len(move.ids)
                blocks.store(target, move.ids, move.parent, tokens(move.ids), PAGE_TOKENS)
        self.index.heard(target, False, False, stored)

    def forget(self, target: int) -> None:
        """Its engine is gone, and what it held."""
        self.index.emptied(target)
        self.checkpoints.clear(target)
        if self.ids and target in self.index.blocks:
            self.index.blocks.clear(target)


def tokens(blocks: Sequence[int]) -> list[int]:
    """Token ids, sixteen for each block."""
    return [token for block in blocks for token in (block & 0xFFFFFFFF, block >> 32, *REST)]


REST = (0,) * (PAGE_TOKENS - 2)


def pages(blocks: Sequence[int]) -> bytes:
    """The same in bytes."""
    return b"".join([pack("<QQQQQQQQ", block, 0, 0, 0, 0, 0, 0, 0) for block in blocks])
