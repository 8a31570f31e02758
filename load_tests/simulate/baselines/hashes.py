"""Sessions by hash alone."""

from policies.base import ByLoad, Choice, Fleet, Request, rendezvous


class SessionHash(ByLoad):
    """The session's target by rendezvous hash, whatever its load; a request without a session goes anywhere."""

    name = "session_hash"
    needs_session = True

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads no load."""
        return Choice(rendezvous(request.key, fleet.targets), "hash", moves_home=False)
