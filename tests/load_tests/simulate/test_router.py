"""What the simulated gateway sees and does, one request at a time, under a policy that is told what to say."""

from __future__ import annotations

import pytest

from load_tests.simulate.engine import Options
from load_tests.simulate.places import Reported
from load_tests.simulate.router import Router
from load_tests.workloads.chains import Turn
from policies.base import ByLoad, Choice, Fleet, Rates, Request

BLOCK = 64


class Told(ByLoad):
    """Goes where it is told, and keeps what it saw."""

    name = "told"
    needs_prefix = True
    needs_session = True

    def __init__(self) -> None:
        self.target = 0
        self.moves = True
        self.seen: list[Request] = []

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        self.seen.append(request)
        return Choice(fleet.targets[self.target], "told", self.moves)


@pytest.fixture
def policy() -> Told:
    return Told()


@pytest.fixture
def router(policy: Told) -> Router:
    return Router(policy, 3, Options(kv_tokens=100 * BLOCK, block=BLOCK))


def turn(blocks: int, first: int = 0, output: int = 10) -> Turn:
    return Turn(tuple(range(first, first + blocks)), blocks * BLOCK + 1, output)


def test_a_charge_ends_at_the_first_byte_and_a_request_at_its_last(router: Router) -> None:
    place = router.places[0]
    sent = router.send(turn(10), None, 0.0)
    seconds = Rates().prefill(641, 0)
    assert (place.wait, place.running, place.busy) == (seconds, 1, 0.0)
    second = router.send(turn(10, first=50), None, 0.1)
    assert place.wait == pytest.approx(2 * seconds)
    router.begun(sent, 0.2)
    assert (place.wait, place.running, place.busy) == (pytest.approx(seconds), 2, 1.0)
    router.ended(sent, 0, 0.3)
    assert (place.wait, place.running, place.busy) == (pytest.approx(seconds), 1, 0.0)
    router.begun(second, 0.4)
    router.ended(second, 0, 0.5)
    assert (place.wait, place.running, place.busy) == (0.0, 0, 0.0)


def test_only_what_is_not_held_is_charged(router: Router) -> None:
    place = router.places[0]
    first = router.send(turn(10), None, 0.0)
    router.begun(first, 0.1)
    router.ended(first, 0, 0.2)
    again = router.send(turn(12), None, 1.0)
    assert again.predicted == 640
    assert place.wait == pytest.approx(place.rates.prefill(12 * BLOCK + 1 - 640, 640))


def test_homes_are_counted_and_move_when_the_choice_says_so(router: Router, policy: Told) -> None:
    def homes() -> list[int]:
        return [place.homes for place in router.places]

    router.send(turn(2), "a", 0.0)
    router.send(turn(2, first=9), "b", 0.0)
    assert homes() == [2, 0, 0]
    policy.target, policy.moves = 1, False
    router.send(turn(4), "a", 1.0)
    assert (homes(), router.decisions.rehomed) == ([2, 0, 0], 0)
    policy.moves = True
    router.send(turn(5), "a", 2.0)
    assert (homes(), router.decisions.rehomed) == ([1, 1, 0], 1)
    assert [request.home for request in policy.seen] == [None, None, 0, 0]
    assert [request.siblings for request in policy.seen] == [0, 0, 1, 2]
    assert policy.seen[0].session == policy.seen[2].session != policy.seen[1].session


def test_siblings_are_those_that_run_now(router: Router, policy: Told) -> None:
    sent = router.send(turn(2), "a", 0.0)
    router.begun(sent, 0.1)
    router.ended(sent, 0, 0.2)
    router.send(turn(3), "a", 1.0)
    assert policy.seen[-1].siblings == 0
    router.send(turn(3), "a", 1.1)
    assert policy.seen[-1].siblings == 1


def test_prompts_that_run_are_pinned_until_they_end(router: Router, policy: Told) -> None:
    running = router.send(turn(60), None, 0.0)
    for number in range(1, 4):
        other = router.send(turn(60, first=100 * number), None, float(number))
        router.begun(other, number + 0.1)
        router.ended(other, 0, number + 0.2)
    router.send(turn(61), None, 5.0)
    assert policy.seen[-1].holdings == {0: 60 * BLOCK}
    router.begun(running, 6.0)
    router.ended(running, 0, 6.0)
    assert running.pin is not None and not running.pin.pins


def test_answers_correct_what_is_believed(router: Router, policy: Told) -> None:
    for number in range(4):
        sent = router.send(turn(40), None, float(number))
        router.begun(sent, number + 0.1)
        # Nothing is ever found, whatever is believed.
        router.ended(sent, 0, number + 0.2)
    router.send(turn(40), None, 9.0)
    assert policy.seen[1].holdings == {0: 40 * BLOCK}
    assert policy.seen[-1].holdings == {}


def test_rates_are_learned_only_of_requests_that_were_alone(router: Router) -> None:
    assert router.learning is not None
    one = router.send(turn(2), None, 0.0)
    two = router.send(turn(2, first=9), None, 0.0)
    for sent in (one, two):
        router.begun(sent, 0.5)
        router.ended(sent, 0, 1.0)
    assert router.learning.samples == 0
    three = router.send(turn(2, first=20), None, 2.0)
    router.begun(three, 2.5)
    router.send(turn(2, first=30), None, 2.6)
    router.ended(three, 0, 3.0)
    assert router.learning.samples == 1


def test_load_of_others_is_what_reports_tell_beyond_our_own(router: Router) -> None:
    sent = router.send(turn(2), None, 0.0)
    place, other = router.places[:2]
    router.polled([Reported(1, 3), Reported(2, 0), Reported(0, 0)], 0.0)
    assert (place.foreign, place.load) == (3.0, 4.0)
    assert place.queued == pytest.approx(2 * place.rates.prefill(1000, 0))
    assert (other.foreign, other.busy, other.wait) == (2.0, 2.0, 0.0)
    router.polled([Reported(1, 0), Reported(0, 0), Reported(0, 0)], 0.0)
    assert (place.foreign, place.queued, other.foreign, other.busy) == (0.0, 0.0, 0.0, 0.0)
    router.begun(sent, 1.0)
    router.ended(sent, 0, 1.0)
    assert (place.wait, place.busy) == (0.0, 0.0)
