"""Sessions that come, go on, are restored, moved, paired and forgotten in any order: homes are exact, nothing leaks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gateway.content import ENDS, end_of
from gateway.naming import Found
from gateway.sessions import Session, Sessions
from kv_index.pages import SYMBOL, Pages
from tests.gateway.test_sessions import prompt_of, user

IDLE = 40.0
TARGETS = st.integers(0, 3)
PICKS = st.integers(0, 10_000)


def pages(count: int) -> Pages:
    return Pages(b"s" * (SYMBOL * count), 0, b"")


class Homes(RuleBasedStateMachine):
    """What the gateway does to its store, against what the store says of its own sessions. Seconds are made up."""

    MOST = 6

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[int] = Counter()
        self.dropped: list[Session] = []
        self.told: list[Session] = []
        self.store = Sessions(most=self.MOST, idle=IDLE, homes=self._homes, dropped=self.dropped.append)
        self.store.bound = self.told.append
        self.now = 1000.0
        self.known: list[Session] = []
        """All that there ever were: requests still hold those that were forgotten."""
        self.made = 0

    def _homes(self, target: int, change: int) -> None:
        self.counted[target] += change
        assert self.counted[target] >= 0, "no target has less than no homes, not even for a moment"

    def _pick(self, pick: int) -> Session:
        return self.known[pick % len(self.known)]

    def _keep(self, session: Session) -> None:
        if not any(session is other for other in self.known):
            self.known.append(session)

    # -- requests ---------------------------------------------------------------------------------------------------

    @rule(value=st.integers(0, 9), child=st.booleans(), seconds=st.floats(0, 6))
    def find(self, value: int, child: bool, seconds: float) -> None:
        self.now += seconds
        found = Found("x-session-id", b"%d" % value, child=b"c" if child else b"")
        session = self.store.find(found, "t", "m", self.now)
        assert not session.gone and session.used == self.now
        self._keep(session)

    @rule(chat=st.integers(0, 3), turns=st.integers(1, 3), seconds=st.floats(0, 6))
    def say(self, chat: int, turns: int, seconds: float) -> None:
        self.now += seconds
        prompt = prompt_of([user(f"{chat}"), *(user(f"{turn}") for turn in range(turns))])
        session = self.store.by_content(prompt, 1, "t", "m", self.now)
        assert session is not None and not session.gone
        self._keep(session)
        said = end_of(prompt, 1)
        assert said is not None
        self.store.remember_content(session, said)

    @rule(value=st.integers(0, 9), seconds=st.floats(0, 6))
    def look(self, value: int, seconds: float) -> None:
        """A dry run, and the looks of the control plane."""
        self.now += seconds
        before = [(session, session.used) for session in self.store.all()]
        self.store.find(Found("x-session-id", b"%d" % value), "t", "m", self.now, dry=True)
        self.store.named(b"%d" % value, "t", "m")
        self.store.recent(3)
        for target in range(4):
            there = self.store.at_home(target)
            assert all(target in (session.home, session.partner) for session in there)
        assert before == [(session, session.used) for session in self.store.all()]

    @precondition(lambda self: self.known)
    @rule(pick=PICKS, running=st.integers(0, 2))
    def run(self, pick: int, running: int) -> None:
        self._pick(pick).running = running

    @precondition(lambda self: self.known)
    @rule(pick=PICKS, count=st.integers(0, 5))
    def keep_pages(self, pick: int, count: int) -> None:
        self.store.keep_pages(self._pick(pick), pages(count))

    # -- homes ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=PICKS, at=TARGETS)
    def bind(self, pick: int, at: int) -> None:
        session = self._pick(pick)
        self.store.bind(session, at, "load")
        assert session.home == (None if session.gone else at)

    @precondition(lambda self: self.known)
    @rule(pick=PICKS, at=st.one_of(st.none(), TARGETS))
    def bind_partner(self, pick: int, at: int | None) -> None:
        session = self._pick(pick)
        self.store.bind_partner(session, at)
        assert session.partner == (None if session.gone else at)

    @precondition(lambda self: self.known)
    @rule(pick=PICKS)
    def unbind(self, pick: int) -> None:
        self.store.unbind(self._pick(pick))
        assert self._pick(pick).home is None

    @rule(at=TARGETS)
    def unbind_all(self, at: int) -> None:
        self.store.unbind_all(at)
        assert self.counted[at] == 0
        assert self.store.at_home(at) == []

    # -- ends -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=PICKS)
    def drop(self, pick: int) -> None:
        session = self._pick(pick)
        before = len(self.dropped)
        self.store.drop(session)
        self.store.drop(session)
        assert session.gone and session.home is None and session.partner is None
        assert len(self.dropped) - before <= 1

    @precondition(lambda self: self.known)
    @rule(pick=PICKS)
    def end(self, pick: int) -> None:
        """With its sub-agents; of one that was forgotten before nothing is left to end."""
        session = self._pick(pick)
        if not session.gone:
            inner = [child for child in self.store.children(session) if child.inner]
            self.store.end(session)
            assert session.gone and all(child.gone for child in inner)

    @rule(seconds=st.floats(0, 60))
    def sweep(self, seconds: float) -> None:
        self.now += seconds
        running = [session for session in self.store.all() if session.running]
        self.store.sweep(self.now)
        assert all(not session.gone for session in running), "what runs is not idle"
        for session in self.store.all():
            assert session.used > self.now - IDLE

    # -- restarts ---------------------------------------------------------------------------------------------------

    @rule(value=st.integers(0, 9), at=st.one_of(st.none(), TARGETS), partner=st.one_of(st.none(), TARGETS), pick=PICKS)
    def restore(self, value: int, at: int | None, partner: int | None, pick: int) -> None:
        """One that was kept over a restart is taken back, and its home joins; what it said, others may have said too."""
        key = xxh3_128_digest(b"restored %d" % value)
        session = Session(key, "content", "t", "m", xxh3_64_intdigest(key))
        session.parent = self._pick(pick).key if self.known and pick % 2 else None
        if self.known:
            other = self._pick(pick)
            session.ends, session.asked = (*other.ends, key), (*other.asked, *other.ends, *other.asked)
        room = len(self.store) < self.MOST and self.store.get(key) is None
        # Those that were used last are restored first, and all of them stand behind those that came meanwhile.
        used = min((each.used for each in self.store.all()), default=self.now) - 0.5
        taken = self.store.restore(session, used)
        assert taken is room
        if not taken:
            assert self.store.get(key) is not session
            return
        self._keep(session)
        if at is not None:
            self.store.bind(session, at, "restored")
        self.store.bind_partner(session, partner)

    @precondition(lambda self: self.known)
    @rule(pick=PICKS)
    def restore_again(self, pick: int) -> None:
        """One of a key that is there."""
        session = self._pick(pick)
        if not session.gone:
            twin = Session(session.key, "x-session-id", "t", "m", session.hash)
            assert not self.store.restore(twin, self.now)
            assert self.store.get(session.key) is session

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def homes_are_exact(self) -> None:
        wanted: Counter[int] = Counter()
        for session in self.store.all():
            for target in (session.home, session.partner):
                if target is not None:
                    wanted[target] += 1
        assert +self.counted == wanted

    @invariant()
    def every_session_is_there_once_in_the_order_of_use(self) -> None:
        there: dict[bytes, Session] = vars(self.store)["_sessions"]
        assert len(self.store) == len(there) <= self.MOST
        assert all(key == session.key for key, session in there.items())
        assert {id(session) for session in self.store.all()} == {id(each) for each in self.known if not each.gone}
        used = [session.used for session in self.store.all()]
        assert used == sorted(used)
        assert [*self.store.recent(99)] == [*self.store.all()][::-1]

    @invariant()
    def children_are_those_that_name_it(self) -> None:
        live = list(self.store.all())
        for session in live:
            named = [other for other in live if other.parent == session.key]
            assert {id(child) for child in self.store.children(session)} == {id(child) for child in named}
        assert set(vars(self.store)["_children"]) == {session.parent for session in live if session.parent is not None}

    @invariant()
    def nothing_is_left_of_those_that_are_gone(self) -> None:
        ends = self.store.ends
        ends.check()
        assert len(ends) <= 2 * ENDS * self.MOST
        for session in self.store.all():
            assert max(len(session.ends), len(session.asked)) <= ENDS
            assert all(session in ends.claims(end) for end in session.ends + session.asked)
        assert self.store.symbol_bytes == sum(len(session.pages.symbols) for session in self.store.all())
        for session in self.known:
            if session.gone:
                assert (session.home, session.partner, session.ends, session.asked) == (None, None, (), ())
                assert not session.pages.symbols
        assert len(self.dropped) == len({id(session) for session in self.dropped}), "each is said to be gone once"
        assert {id(session) for session in self.dropped} == {id(session) for session in self.known if session.gone}

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for session in list(self.store.all()):
            self.store.drop(session)
        assert not +self.counted
        assert (len(self.store), self.store.symbol_bytes, len(self.store.ends)) == (0, 0, 0)
        assert not vars(self.store)["_children"]


TestHomes: Any = Homes.TestCase
TestHomes.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
