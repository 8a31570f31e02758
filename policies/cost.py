"""Seconds: what it costs to send a request to a target.

``wait + prefill + restore + transfer + memory + interference + delay + placement``, each defined below. All rates come from
the target (`Rates`) and from what is asked (`policies.demand`), which the gateway learns; nothing here is a tuning knob.
"""

from policies.base import Rates, Request, Target, Terms

EXPECTED_OUTPUT = 128
"""Tokens that a request is expected to generate, for what running decodes cost it."""

DELAYED = 0.05
"""Weight of a second by which a prefill delays each running decode, against a second of the request's own."""

TURN_TOKENS = 700
"""Uncached tokens of an ordinary agent turn (median of real coding-agent traces: 713)."""


AHEAD = 4.0
"""Of the turns that a session will take, how many its home is charged with: those further off may come anywhere."""

BEYOND = 4
"""Turns by which promised load may outweigh a whole prefill."""


def turn(rates: Rates) -> float:
    """Seconds of prefill that one ordinary turn of a session takes."""
    return rates.base + TURN_TOKENS * (rates.token + rates.attention * (0.5 * TURN_TOKENS))


def interference(rates: Rates, prefill: float) -> float:
    """Seconds for each running decode: the request delays it by its prefill, and is slowed by it while it generates."""
    return DELAYED * prefill + EXPECTED_OUTPUT * rates.decode


def promised(request: Request, rates: Rates) -> float:
    """Seconds of prefill that each session at home on a target promises to it."""
    return min(request.turns, AHEAD) * turn(rates)


def homed(request: Request, target: Target) -> float:
    """Seconds that all sessions at home on ``target`` promise to it."""
    return target.homes * promised(request, target.rates)


def crowd(request: Request) -> float:
    """`Request.crowd`; none for one that runs beside others of its session: they will find what it computes."""
    return 0.0 if request.siblings else request.crowd


def delay(request: Request, wait: float, prefill: float) -> float:
    """Seconds that later requests wait longer for a prefill behind ``wait`` (`policies.demand`)."""
    return crowd(request) * prefill * (wait + 0.5 * prefill)


def placement_bound(rates: Rates, tokens: int) -> float:
    """Most seconds by which promised load may count against a candidate.

    Enough to outweigh computing the whole prompt elsewhere, so that no shared start herds, however long; not more, for a
    promise is no queue: an empty newcomer must not draw every session past a real wait.
    """
    return rates.prefill(tokens, 0) + BEYOND * turn(rates)


def restore(request: Request, target: Target) -> float:
    """Seconds to bring what ``target`` holds of the prompt below its device back to it."""
    told = request.restored.get(target.id)
    if told is None:
        return 0.0
    host, disk, shared = target.rates.restore
    return told[0] * host + told[1] * disk + told[2] * shared


def memory(request: Request, target: Target) -> float:
    """Seconds until ``target`` has room for the prompt and what it will generate: what runs there ends evenly over the time of
    one answer, and frees what it has. None where its room is not known."""
    if target.room is None:
        return 0.0
    lacking = target.active + (request.tokens or 0) + EXPECTED_OUTPUT - target.room
    if lacking <= 0.0 or target.active <= 0.0:
        return 0.0
    answer = EXPECTED_OUTPUT * (target.rates.base + target.busy * target.rates.decode)
    return min(lacking / target.active, 1.0) * answer


def terms(request: Request, target: Target, least: float | None, now: float, thrift: float = 0.0) -> Terms:
    """Cost of ``request`` on ``target``; ``thrift``: for how many more times its seconds a prefill counts.

    ``least``: the least `homed` of all candidates; ``None`` when the request places no session. Between the turns of
    causal agents nothing is in flight, so a session is placed by the load that it will meet: what a candidate is promised
    more than the least promised one, up to `placement_bound`.
    """
    rates = target.rates
    tokens = request.tokens or 0
    held = min(request.holdings.get(target.id, 0), tokens)
    prefill = rates.prefill(tokens - held, held)
    placement = 0.0
    if least is not None and request.home != target.id:
        placement = min(homed(request, target) - least, placement_bound(rates, tokens))
    wait = target.waits(now)
    if request.queued and target.id == request.home:
        wait += request.queued
    if target.share < 1.0:
        wait += (1.0 / target.share - 1.0) * (prefill + wait + turn(rates))
    drag = target.busy * interference(rates, prefill) if target.busy else 0.0
    back = restore(request, target) if request.restored else 0.0
    brought = rates.moved(request.fetched.get(target.id, 0)) if request.fetched else 0.0
    # `delay`, without the calls where nobody is delayed.
    later = thrift * prefill
    if request.crowd:
        later += delay(request, wait, prefill)
    return Terms(wait, prefill, drag, placement, back, later, brought)
