"""Seconds: what it costs to send a request to a target.

``wait + prefill + interference + placement``, each defined below. All rates come from the target (`Rates`), which the
gateway learns; nothing here is a tuning knob.
"""

from policies.base import Rates, Request, Target, Terms

EXPECTED_OUTPUT = 128
"""Tokens that a request is expected to generate, for what running decodes cost it."""

DELAYED = 0.05
"""Weight of a second by which a prefill delays each running decode, against a second of the request's own."""

TURN_TOKENS = 700
"""Uncached tokens of an ordinary agent turn (median of real coding-agent traces: 713)."""


def turn(rates: Rates) -> float:
    """Seconds of prefill that one ordinary turn of a session takes."""
    return rates.prefill(TURN_TOKENS, 0)


def interference(rates: Rates, prefill: float) -> float:
    """Seconds for each running decode: the request delays it by its prefill, and is slowed by it while it generates."""
    return DELAYED * prefill + EXPECTED_OUTPUT * rates.decode


def terms(request: Request, target: Target, least_homes: int | None) -> Terms:
    """Cost of ``request`` on ``target``.

    ``least_homes``: fewest sessions at home on any candidate; ``None`` when the request places no session. Between the
    turns of causal agents nothing is in flight, so a session is placed by the load it will bring: every session more
    than the least loaded candidate has is one ordinary turn that ours may meet.
    """
    rates = target.rates
    tokens = request.tokens or 0
    held = min(request.holdings.get(target.id, 0), tokens)
    prefill = rates.prefill(tokens - held, held)
    placement = 0.0
    if least_homes is not None and request.home != target.id:
        placement = (target.homes - least_homes) * turn(rates)
    wait = target.wait
    if target.share < 1.0:
        wait += (1.0 / target.share - 1.0) * (prefill + wait + turn(rates))
    return Terms(wait, prefill, target.busy * interference(rates, prefill) if target.busy else 0.0, placement)
