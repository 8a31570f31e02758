"""The soak, for as many minutes as WARMROUTE_SOAK_MINUTES says; for some seconds where it says nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

from load_tests.soak.answers import Answer
from load_tests.soak.asked import Asked, Asking
from load_tests.soak.plan import Plan
from load_tests.soak.soaking import soak
from load_tests.soak.verdict import Harm, Verdicts
from load_tests.soak.watch import Watch

MINUTES = float(os.environ.get("WARMROUTE_SOAK_MINUTES", "0"))
BRIEF = Plan(25.0, engines=4, calibrate=4.0, pause=1.5, load=0.6)


async def test_nothing_is_wrong_lost_or_left_over_while_engines_die_and_the_configuration_changes() -> None:
    plan = Plan(MINUTES * 60) if MINUTES else BRIEF
    soaked = await soak(plan)
    assert soaked.problems == [], json.dumps(soaked.told(), indent=2)
    assert soaked.verdicts.good > plan.seconds
    assert soaked.did, "nothing happened meanwhile"


def test_a_run_that_is_broken_off_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "load_tests.soak", "--minutes", "5", "--engines", "3"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        for _ in range(600):
            if (found := _children(process.pid)) and len(found) == 4:
                break
            process_ended = process.poll()
            assert process_ended is None
            sleep(0.1)
        assert len(found) == 4, "three engines and a gateway"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert [pid for pid in found if Path(f"/proc/{pid}").exists()] == []
    finally:
        process.kill()
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


# -- the judge is no yes-man -------------------------------------------------------------------------------------------


def asked() -> Asked:
    return Asking(3).first(stream=True)


def answered(of: Asked, **changed: Any) -> Answer:
    good = Answer(
        monotonic(), monotonic(), 200, worker="w", id="one", text=of.answer(), generated=of.tokens, whole=True
    )
    for name, value in changed.items():
        setattr(good, name, value)
    return good


def judged(
    *answers: Answer, of: Asked, harm: Harm | None = None, limited: bool = False, hurried: bool = False
) -> Verdicts:
    verdicts = Verdicts(harm or Harm())
    for answer in answers:
        verdicts.of(of, answer, limited, hurried)
    return verdicts


def test_an_answer_is_good_to_the_letter_or_wrong() -> None:
    one, other = asked(), Asking(4).first(stream=True)
    assert judged(answered(one), of=one).good == 1
    for changed in (
        {"text": other.answer()},
        {"text": one.answer() * 2},
        {"text": one.answer()[:-1]},
        {"generated": one.tokens + 1},
    ):
        assert len(judged(answered(one, **changed), of=one).wrong) == 1, changed
    twice = judged(answered(one), answered(one), of=one)
    assert (twice.good, len(twice.wrong)) == (1, 1)


def test_no_answer_is_lost() -> None:
    one = asked()
    assert len(judged(answered(one, status=None, error="reset"), of=one).lost) == 1


def test_a_broken_stream_is_excused_only_by_what_was_done_to_its_engine() -> None:
    one = asked()
    part = answered(one, whole=False, text=one.answer()[:5])
    assert judged(part, of=one).spared.total() == 1
    harm = Harm()
    harm.begins("another")
    assert judged(part, of=one, harm=harm).spared.total() == 1
    harm.begins("w")
    harmed = answered(one, whole=False, text=one.answer()[:5])
    assert judged(harmed, of=one, harm=harm).unspared.total() == 1
    foreign = answered(one, whole=False, text="Something else")
    assert len(judged(foreign, of=one, harm=harm).wrong) == 1


@pytest.mark.parametrize(
    ("status", "refused", "limited", "hurried", "excused"),
    [
        (429, "requests", True, False, True),
        (429, "requests", False, False, False),
        (429, "too_long", False, False, True),
        (429, None, True, True, False),
        (504, "timeout", False, True, True),
        (504, "timeout", False, False, False),
        (502, None, False, True, False),
        (503, None, True, True, False),
        (401, None, True, True, False),
        (500, None, True, True, False),
    ],
)
def test_a_refusal_is_excused_only_by_its_rule(
    status: int, refused: str | None, limited: bool, hurried: bool, excused: bool
) -> None:
    one = asked()
    answer = answered(one, status=status, refused=refused, text="", error="words")
    verdicts = judged(answer, of=one, limited=limited, hurried=hurried)
    assert (verdicts.unspared.total(), verdicts.spared.total()) == ((1, 0) if excused else (0, 1))


def test_memory_that_grows_on_is_told() -> None:
    def leaks(sizes: list[int], every: float = 10.0) -> str | None:
        watch = Watch(SimpleNamespace())  # type: ignore[arg-type]
        watch.memory = [(at * every, size) for at, size in enumerate(sizes)]
        return watch.leaks()

    mib = 2**20
    assert leaks([50 * mib] * 100) is None
    assert leaks([(30 + min(at, 20)) * mib for at in range(100)]) is None
    told = leaks([(50 + at // 4) * mib for at in range(100)])
    assert told is not None and "grew" in told
    # In its first minutes what has a bound is filled.
    assert leaks([(50 + at // 4) * mib for at in range(100)], every=0.5) is None
    assert leaks([(50 + at) * mib for at in range(100)], every=0.5) is not None
