"""Finding the session of a request by its content: its messages extend the whole of an earlier request's.

A session is found by digests of what it said, up to where each of its last prompts ended. Many may have said the same: the
rollouts of one task all begin alike, and only what the model answered tells them apart, which the gateway does not read. So
each of them that comes back takes one that did not go on yet, whose answer is of the likeliest length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xxhash import xxh3_128, xxh3_128_digest

from gateway.prompt import Prompt

if TYPE_CHECKING:
    from gateway.sessions import Session

ENDS = 3
"""Ends of each kind that are kept for a session."""
SAME = 64
"""Sessions that may be found by one end."""
NEAR = 4
"""Earlier ends that are tried one by one, latest first: an ordinary turn is found by the second."""
BYTES_PER_TOKEN = 4.0
"""Of an answer's text, to compare lengths."""


class Ends:
    """What sessions are found by."""

    def __init__(self) -> None:
        self._newest: dict[bytes, Session] = {}
        self._others: dict[bytes, list[Session]] = {}
        """Others that said the same, the oldest first."""
        self.elsewhere: Callable[[bytes], Session | None] | None = None
        """The session of an end that is not known here, if another gateway has it."""

    def __len__(self) -> int:
        return len(self._newest)

    def find(self, prompt: Prompt, scope: int) -> Session | None:
        """The session whose last messages ``prompt`` extends. ``scope``: 64 bits of what keeps sessions apart.

        Only a prompt that adds at least one message to the *whole* of an earlier one joins it, so a start that a fleet
        shares never joins two sessions.
        """
        view = memoryview(prompt.text)
        later = len(view)
        for near, mark in enumerate(prompt.earlier_ends()):
            if near == NEAR:
                return self._far_back(prompt, view, scope)
            session = self._of(xxh3_128_digest(view[:mark], scope), later - mark)
            if session is not None:
                return session
            later = mark
        return None

    def _far_back(self, prompt: Prompt, view: memoryview, scope: int) -> Session | None:
        """The same over all earlier ends, in one pass over the text."""
        hashed, at, found = xxh3_128(seed=scope), 0, None
        for mark in reversed(list(prompt.earlier_ends())):
            hashed.update(view[at:mark])
            at = mark
            found = self._of(hashed.digest(), 0) or found
        return found

    def _of(self, end: bytes, answer: int) -> Session | None:
        """The session of an end; ``answer``: bytes of the message behind it."""
        newest = self._newest.get(end)
        if newest is None:
            return None if self.elsewhere is None else self.elsewhere(end)
        others = self._others.get(end)
        if others is None:
            return newest
        waiting = [session for session in (*others, newest) if session.last == end and not session.running]
        if not waiting:
            return newest
        tokens = answer / BYTES_PER_TOKEN
        return min(waiting, key=lambda session: abs(session.tail_tokens - tokens))

    def remember(self, session: Session, end: bytes, asks: bool) -> None:
        """``session`` said up to ``end``; ``asks``: a user's message ends it."""
        session.last = end
        # Ends of tool steps come and go; where a user had asked is where the next question may have to go on from.
        if not self._claim(session, end):
            return
        ends = (*(session.asked if asks else session.ends), end)
        if len(ends) > ENDS:
            self._release(session, ends[0])
            ends = ends[1:]
        if asks:
            session.asked = ends
        else:
            session.ends = ends

    def restore(self, session: Session) -> None:
        """Claim what it was found by before, behind those that were used later."""
        ends, asked = session.ends, session.asked
        session.ends = tuple([end for end in dict.fromkeys(ends[-ENDS:]) if self._claim_behind(session, end)])
        session.asked = tuple([end for end in dict.fromkeys(asked[-ENDS:]) if self._claim_behind(session, end)])

    def forget(self, session: Session) -> None:
        """It is found by nothing any more."""
        for end in (*session.ends, *session.asked):
            self._release(session, end)
        session.ends = session.asked = ()

    def _claim(self, session: Session, end: bytes) -> bool:
        """Whether that is new."""
        newest = self._newest.get(end)
        if newest is session:
            return False
        if newest is not None:
            others = self._others.setdefault(end, [])
            if session in others:
                return False
            others.append(newest)
            if len(others) > SAME:
                oldest = others.pop(0)
                oldest.ends = tuple([each for each in oldest.ends if each != end])
                oldest.asked = tuple([each for each in oldest.asked if each != end])
        self._newest[end] = session
        return True

    def _claim_behind(self, session: Session, end: bytes) -> bool:
        if end not in self._newest:
            self._newest[end] = session
            return True
        others = self._others.get(end)
        if self._newest[end] is session or (others is not None and (session in others or len(others) >= SAME)):
            return False
        self._others.setdefault(end, []).insert(0, session)
        return True

    def _release(self, session: Session, end: bytes) -> None:
        others = self._others.get(end)
        if self._newest.get(end) is session:
            if others:
                self._newest[end] = others.pop()
            else:
                del self._newest[end]
        elif others is not None and session in others:
            others.remove(session)
        if others is not None and not others:
            del self._others[end]

    def claims(self, end: bytes) -> list[Session]:
        """Sessions that an end finds, the oldest first."""
        newest = self._newest.get(end)
        return [] if newest is None else [*self._others.get(end, ()), newest]

    def check(self) -> None:
        """Raises `AssertionError` unless each end is claimed once by each session that says so, and by no other."""
        for end in {*self._newest, *self._others}:
            found = self.claims(end)
            assert 1 <= len(found) <= SAME + 1
            assert len({id(session) for session in found}) == len(found)
            for session in found:
                assert not session.gone
                assert [end in session.ends, end in session.asked].count(True) == 1
        assert all(self._others.values())


def end_of(prompt: Prompt, scope: int) -> tuple[bytes, bool] | None:
    """What a session that said ``prompt`` is found by: a digest, and whether a user's message ends it."""
    return (xxh3_128_digest(prompt.text, scope), prompt.asks) if prompt.says else None
