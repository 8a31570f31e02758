"""The doctor's store: what it keeps and for how long, what it counts, and that nothing that clients send can end it."""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random
from typing import Any

import pytest

from gateway.doctor import CALM, LARGEST, LAST, SESSIONS, Doctor, Note
from gateway.examining import PAIRS, STARTS
from gateway.findings import MOST, OFFSETS, Cost, Findings, normal
from gateway.prompt import Thinking
from kv_index.causes import Cause
from kv_index.heads import Break
from kv_index.outlines import Part, Place
from tests.gateway.doctor_corpus import KINDS, MAKERS, pairs

SECRET = "the launch code is 0000"
SYSTEM = f"It is {{}}. You help, and {SECRET}."
TOP = 1 << 64


def chat(system: str = "You help.", *said: str, tools: list[Any] | None = None) -> bytes:
    roles = ("user", "assistant")
    told: list[dict[str, Any]] = [{"role": "system", "content": system}]
    told += [{"role": roles[at % 2], "content": text} for at, text in enumerate(said or ("hello",))]
    return json.dumps({"model": "m", "messages": told, **({"tools": tools} if tools else {})}).encode()


def note(body: bytes, session: int = 1, **more: Any) -> Note:
    told: dict[str, Any] = {
        "tenant": "x",
        "model": "m",
        "kind": "chat",
        "thinking": Thinking.STRIP,
        "prompt_tokens": None,
        "cached_tokens": None,
        "before_tokens": None,
        "shared_tokens": None,
        "new": False,
        "now": 0.0,
    }
    return Note(session=session, body=body, **{**told, **more})


def examined(doctor: Doctor, *notes: Note) -> Doctor:
    for each in notes:
        doctor.seen(each)
        doctor.examine()
    return doctor


def two(**more: Any) -> tuple[Note, Note]:
    """A session whose system prompt tells the time."""
    first = note(chat(SYSTEM.format("09:00:01")), new=True, prompt_tokens=100, cached_tokens=0)
    told = {"prompt_tokens": 160, "cached_tokens": 40, "before_tokens": 120, "shared_tokens": 40, "now": 7.0, **more}
    return first, note(chat(SYSTEM.format("09:00:02"), "hello", "hi", "and now?"), **told)


def test_a_break_is_told_with_its_place_its_cost_and_its_cure() -> None:
    counted: list[tuple[str, str, int]] = []
    doctor = examined(Doctor(counted=lambda *told: counted.append(told)), *two())
    report = doctor.report()
    (finding,) = report["findings"]
    assert finding == {
        "tenant": "x",
        "model": "m",
        "cause": "time",
        "place": {"part": "system", "offset": 6, "text": "character 6 of the system prompt"},
        "between": False,
        "breaks": 1,
        "sessions": 1,
        "tokens_lost": 80,
        "share_of_hits_lost": 80 / 120,
        "canonical_gain_tokens": 0,
        "estimated": False,
        "last_seen": 7.0,
        "cure": "move it to the end",
        "text": "tenant x loses 67 % of its hits at character 6 of the system prompt: a time or date; move it to the end",
        "example": None,
    }
    assert counted == [("x", "time", 80)]
    assert (report["examined"], report["skipped"], report["share"]) == (2, 0, 1.0)
    assert report["breaks"] == {"examined": 1, "skipped": 0}
    assert report["tenants"]["x"]["m"]["tokens_cached"] == 40
    (own,) = doctor.breaks(1)
    assert (own["time"], own["cause"], own["tokens_lost"], own["place"]["offset"]) == (7.0, "time", 80, 6)


def test_no_word_of_a_prompt_is_kept_unless_examples_are_asked_for() -> None:
    doctor = examined(Doctor(), *two())
    assert SECRET[:10] not in json.dumps(doctor.report()) + json.dumps(doctor.breaks(1))
    (finding,) = examined(Doctor(examples=True), *two()).report()["findings"]
    assert finding["example"] == {
        "before": "It is 09:00:01. You help, and the launch co"[:43],
        "after": "It is 09:00:02. You help, and the launch co"[:43],
    }


def test_without_counts_the_cost_is_estimated_by_bytes() -> None:
    first, second = two(prompt_tokens=None, before_tokens=None, shared_tokens=None, cached_tokens=None)
    (finding,) = examined(Doctor(), first._replace(prompt_tokens=None, cached_tokens=None), second).report()["findings"]
    system = SYSTEM.format("09:00:01")
    assert finding["estimated"] and finding["share_of_hits_lost"] is None
    assert finding["tokens_lost"] == round((len(system + "hello") - system.index("1. You")) / 4)
    assert finding["text"].startswith(f"tenant x lost about {finding['tokens_lost']} tokens at character 6")
    # With a count of the prompt's tokens those are what its bytes are.
    (finding,) = examined(Doctor(), first, second._replace(prompt_tokens=2000)).report()["findings"]
    size = len(SYSTEM.format("09:00:02") + "hello" + "hi" + "and now?")
    assert finding["tokens_lost"] == round((len(system + "hello") - system.index("1. You")) * 2000 / size)


TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"It is {name}. " * 9, "parameters": {}}}
    for name in "abc"
]


def test_what_canonical_prompts_would_save() -> None:
    first = note(chat(tools=TOOLS), new=True)
    second = note(
        chat("You help.", "hello", "hi", "so?", tools=TOOLS[::-1]),
        prompt_tokens=300,
        before_tokens=250,
        shared_tokens=10,
    )
    (finding,) = examined(Doctor(), first, second).report()["findings"]
    assert (finding["cause"], finding["tokens_lost"], finding["canonical_gain_tokens"]) == ("tools_reordered", 240, 240)
    # A time behind them is still lost.
    first = note(chat("Now: 09:00. Help.", tools=TOOLS), new=True)
    second = note(
        chat("Now: 10:00. Help.", "hello", "hi", "so?", tools=TOOLS[::-1]),
        prompt_tokens=300,
        before_tokens=250,
        shared_tokens=10,
    )
    (finding,) = examined(Doctor(), first, second).report()["findings"]
    assert finding["cause"] == "tools_reordered" and 200 < finding["canonical_gain_tokens"] < 240


def test_prompts_that_extend_are_not_looked_at() -> None:
    doctor = Doctor()
    examined(doctor, note(chat(), new=True, cached_tokens=3))
    doctor.seen(note(b"not even JSON", before_tokens=10, prompt_tokens=20, cached_tokens=9))
    assert not doctor.examine()
    told = doctor.report()
    assert (told["examined"], told["skipped"]) == (2, 0)
    assert told["tenants"]["x"]["m"]["tokens_cached"] == 12


def test_retries_branches_and_breaks_that_bodies_do_not_show() -> None:
    doctor = Doctor()
    one = note(chat("You help.", "What is it?"), new=True)
    examined(doctor, one, note(chat("You help.", "What else is it?"), shared_tokens=3))
    examined(doctor, note(chat("Write a title.", "Something"), shared_tokens=0))
    examined(
        doctor,
        note(
            chat("Write a title.", "Something", "A title", "Another"),
            shared_tokens=2,
            before_tokens=9,
            prompt_tokens=20,
        ),
    )
    told = doctor.report()
    assert told["findings"] == []
    assert {
        name: told["tenants"]["x"]["m"][name]
        for name in ("retries", "branches", "unexplained", "unexplained_tokens", "breaks")
    } == {
        "retries": 1,
        "branches": 1,
        "unexplained": 1,
        "unexplained_tokens": 7,
        "breaks": 0,
    }


# -- between sessions -------------------------------------------------------------------------------------------------


def test_starts_that_differ_by_a_time_are_a_finding_and_other_applications_are_none() -> None:
    doctor = Doctor()
    for session in range(5):
        examined(doctor, note(chat(f"Now: 09:00:0{session}. You help with everything.", "hi"), session, new=True))
        examined(doctor, note(chat("You write titles.", f"number {session}"), 100 + session, new=True))
        examined(doctor, note(chat(f"You are agent of {'abcde'[session]}.", "hi"), 200 + session, new=True))
    (finding,) = doctor.report()["findings"]
    assert (finding["cause"], finding["between"], finding["breaks"], finding["sessions"]) == ("time", True, 4, 4)
    assert finding["place"]["offset"] == 5 and finding["estimated"]
    assert finding["text"] == (
        "sessions of tenant x share about 3 tokens instead of 10: a time or date at character 5 of the system prompt; "
        "move it to the end"
    )


def test_starts_are_compared_within_a_tenant_and_a_model_only() -> None:
    doctor = Doctor()
    for at, (tenant, model) in enumerate((("x", "m"), ("y", "m"), ("x", "n"))):
        examined(doctor, note(chat(f"Now: 09:00:0{at}. You help."), at, new=True, tenant=tenant, model=model))
    assert doctor.report()["findings"] == []


def test_starts_are_bounded() -> None:
    doctor = Doctor(memory=400_000)
    for at in range(3 * STARTS):
        examined(doctor, note(chat(f"You are number {'x' * at} of many."), at, new=True))
    (known,) = doctor._starts._starts.values()
    assert len(known) == STARTS
    for at in range(PAIRS + 40):
        examined(doctor, note(chat("You help. " * 40), 1000 + at, new=True, model=f"m{at}"))
        doctor.forget(1000 + at)
        assert doctor._starts.size <= 100_000
    assert len(doctor._starts._starts) <= PAIRS
    kept = sum(start.size for starts in doctor._starts._starts.values() for start in starts)
    assert kept == doctor._starts.size > 0


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_keeping_copies_nothing() -> None:
    doctor = Doctor()
    body = chat("You help." * 1000)
    told = note(body, new=True)
    count = sys.getrefcount(body)
    assert doctor.wants(1, 100)
    doctor.seen(told)
    assert doctor._kept[1].waiting is told and doctor._kept[1].waiting.body is body
    assert sys.getrefcount(body) == count
    assert doctor.held == len(body) + 1024


def test_bodies_that_requests_hold_count_as_kept_until_these_are_over() -> None:
    doctor = Doctor(memory=1_000_000)
    assert not doctor.wants(1, LARGEST + 1)
    held = 0
    while doctor.wants(1, 300_000):
        doctor.begun(300_000)
        held += 300_000
    assert held == 900_000 == doctor.held and doctor.wants(1, 100_000)
    assert doctor.skipped == {"too large": 1, "memory": 1}
    # It is no reason to sample fewer sessions.
    assert doctor.share == 1.0
    for _ in range(3):
        doctor.over(300_000)
    assert doctor.held == 0 and doctor.wants(1, 300_000)


def test_what_was_not_held_leaves_nothing_to_compare_with() -> None:
    for size in (LARGEST + 1, 300_000):
        doctor = Doctor(memory=200_000)
        examined(doctor, note(chat(), new=True))
        assert 1 in doctor._kept
        assert not doctor.wants(1, size)
        assert 1 not in doctor._kept
        examined(doctor, note(chat("Another."), before_tokens=9, prompt_tokens=9, shared_tokens=1))
        assert doctor.report()["breaks"]["examined"] == 0


def test_what_is_kept_makes_room_when_it_fills_the_memory() -> None:
    doctor = Doctor(memory=100_000)
    for number in range(9):
        doctor.seen(note(chat("x" * 9_000), number * (TOP // 9), new=True))
    assert doctor.held > 90_000 and doctor.share == 1.0
    assert not doctor.wants(0, 9_000)
    assert doctor.share == 0.5 and doctor.wants(0, 9_000)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_under_random_traffic(seed: int) -> None:
    random = Random(seed)
    memory = random.choice((20_000, 200_000, 2_000_000))
    doctor = Doctor(memory=memory, share=random.choice((1.0, 0.5)))
    sessions = [random.getrandbits(64) for _ in range(300)]
    now, shares, seen = 0.0, set(), 0
    for _ in range(4000):
        now += random.random()
        session = random.choice(sessions)
        way = random.random()
        if way < 0.02:
            doctor.forget(session)
        elif way < 0.1:
            doctor._adapt()
        elif way < 0.3:
            doctor.examine()
        elif doctor.wants(session, size := random.choice((100, 1_000, 10_000))):
            seen += 1
            system = f"Now: {random.randrange(24):02}:00. " + "You help. " * (size // 10)
            extends = random.random() < 0.5
            doctor.seen(
                note(chat(system), session, new=random.random() < 0.1, now=now, before_tokens=5 if extends else None)
            )
        shares.add(doctor.share)
        kept = [each for pair in doctor._kept.values() for each in (pair.base, pair.waiting) if each is not None]
        bodies = sum(len(each.body) for each in kept) + 1024 * len(doctor._kept)
        assert doctor.held == bodies + doctor._starts.size <= memory
        assert all(each < doctor._bar for each in doctor._kept)
        assert set(doctor._queue) <= set(doctor._kept)
        assert doctor.share <= doctor.most_share
    told = doctor.report()
    waiting = sum(1 for pair in doctor._kept.values() if pair.waiting is not None)
    # What was forgotten while it waited is not told.
    assert told["examined"] + told["skipped"] + waiting <= seen + doctor.skipped["memory"]
    if memory == 20_000:
        assert len(shares) > 2 and min(shares) < 0.2
    for session in sessions:
        doctor.forget(session)
    assert doctor.held == doctor._starts.size and not doctor._queue and not doctor._breaks


def test_the_share_grows_again_when_little_is_kept_for_long() -> None:
    doctor = Doctor(memory=10_000, share=0.5)
    for session in range(40):
        doctor.seen(note(b"{" + b" " * 900 + b"}", session * (TOP // 41), new=True))
    low = doctor.share
    assert low < 0.5 and doctor.held <= 10_000
    assert not doctor.wants(int(0.49 * TOP), 100)
    for session in list(doctor._kept):
        doctor.forget(session)
    for now in range(0, 60 * int(CALM), 10):
        doctor.seen(note(b"{}", TOP - 1, now=float(now)))
        doctor._adapt()
    assert doctor.share == 0.5 and doctor.wants(int(0.49 * TOP), 100) and not doctor.wants(int(0.51 * TOP), 100)


def test_what_comes_too_fast_or_is_too_large_or_not_sampled_is_counted() -> None:
    doctor = Doctor(share=0.5)
    doctor.seen(note(chat(), TOP - 1, shared_tokens=3))
    doctor.seen(note(chat(), new=True))
    doctor.seen(note(chat("Now: 09:00."), shared_tokens=3))
    doctor.seen(note(chat("Now: 10:00."), shared_tokens=3))
    assert doctor.examine() and not doctor.examine()
    doctor.seen(note(b" " * (LARGEST + 1), shared_tokens=3))
    assert 1 not in doctor._kept and doctor.held == doctor._starts.size
    told = doctor.report()
    assert told["skipped_by"] == {"not sampled": 1, "too many": 2, "too large": 1}
    assert told["breaks"] == {"examined": 1, "skipped": 3}
    # A body that was not held is no body: nothing is compared with it.
    doctor.seen(note(chat(), 2, new=True))
    doctor.seen(note(b"", 2, before_tokens=5))
    assert doctor.skipped["not held"] == 1 and 2 not in doctor._kept


def test_breaks_go_before_sessions_that_begin() -> None:
    doctor = Doctor()
    examined(doctor, note(chat("Now: 09:00. You help."), 7, new=True))
    for session in range(100, 110):
        doctor.seen(note(chat(), session, new=True))
    doctor.seen(
        note(chat("Now: 10:00. You help.", "hello", "hi", "so"), 7, shared_tokens=1, before_tokens=9, prompt_tokens=9)
    )
    doctor.examine()
    assert len(doctor.report()["findings"]) == 1


def test_breaks_of_sessions_are_bounded() -> None:
    doctor = Doctor()
    for at in range(8):
        body = chat(f"Now: 09:0{at}. You help.", "hello", "hi", "so")
        examined(doctor, note(body, shared_tokens=None if at == 0 else 1, new=at == 0, now=float(at)))
    assert [each["time"] for each in doctor.breaks(1)] == [7.0, 6.0, 5.0, 4.0] and LAST == 4
    broken = Break(Cause.TIME, Place(Part.SYSTEM, "", None, 0), 0, 1, 1)
    (told,) = doctor.findings._found.values()
    for session in range(SESSIONS + 50):
        doctor._record(note(b"", session), broken, 0, Cost(1, 0, False), False)
    assert len(doctor._breaks) == SESSIONS and doctor.breaks(10) == []
    assert len(doctor.findings) == 2 and told.breaks == 7
    doctor.forget(SESSIONS + 49)
    assert doctor.breaks(SESSIONS + 49) == []


def test_findings_are_bounded_and_offsets_that_wander_are_one_place() -> None:
    findings = Findings()
    for at in range(40):
        broken = Break(Cause.TIME, Place(Part.SYSTEM, "", None, at), 0, 1, 1)
        findings.add("x", "m", at, broken, broken.place, Cost(at, 0, False), False, 0.0)
    assert len(findings) == OFFSETS + 1
    assert any(each["place"]["text"] == "the system prompt" for each in findings.ranked())
    for at in range(MOST + 200):
        broken = Break(Cause.TOOLS_CHANGED, Place(Part.TOOL, f"t{at}"), 0, 1, 1)
        findings.add("x", "m", at, broken, broken.place, Cost(1000 + at, 0, False), False, 0.0)
        assert len(findings) <= MOST
    ranked = findings.ranked()
    assert [each["tokens_lost"] for each in ranked] == sorted((each["tokens_lost"] for each in ranked), reverse=True)
    assert len(findings._offsets) <= MOST


def test_two_sessions_breaks_at_the_same_place_are_one_finding() -> None:
    deep = Place(Part.RESULT, "tool", 17, 300, "messages")
    assert normal(deep, Cause.REWRITTEN, 1) == Place(Part.RESULT, "tool")
    first = Place(Part.TEXT, "user", 1, 30, "messages")
    assert normal(first, Cause.TIME, 1) == first
    assert normal(first, Cause.REWRITTEN, 1) == Place(Part.TEXT, "user")
    assert normal(Place(Part.TOOL, "n" * 500, 3, 8), Cause.TOOLS_CHANGED, 0) == Place(Part.TOOL, "n" * 64)
    assert str(normal(Place(Part.TOOL, "grep", 3), Cause.TOOLS_REORDERED, 0)) == "the list of tools"
    assert str(normal(Place(Part.TOOL, "grep", 3, 20), Cause.TOOLS_REORDERED, 0)) == "the tool grep"
    assert normal(Place(Part.TOOL, "grep", 3, 20), Cause.TIME, 0) == Place(Part.TOOL, "grep", 3, 20)


def test_sessions_are_counted_about() -> None:
    random, findings = Random(5), Findings()
    broken = Break(Cause.TIME, Place(Part.SYSTEM, "", None, 0), 0, 1, 1)
    for _ in range(300):
        session = random.getrandbits(64) >> 6
        for _ in range(3):
            findings.add("x", "m", session, broken, broken.place, Cost(1, 0, False), False, 0.0)
    (told,) = findings.ranked()
    assert told["breaks"] == 900 and 270 <= told["sessions"] <= 330


# -- whatever clients send --------------------------------------------------------------------------------------------

BAD = [
    b"",
    b"no",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"messages": 5}',
    b'{"messages": [null]}',
    b'{"messages": [{"role": {}, "content": {"a": 1}}]}',
    b'{"messages": [{"role": "user", "content": [[1]]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}',
    b'{"messages": [], "tools": {"a": 1}}',
    b'{"messages": [], "tools": ["x"]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"messages": [], "tools": [{"a": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}",
    b'{"messages": [], "n": ' + b"9" * 5000 + b"}",
    b'{"input": [{"type": "reasoning", "summary": 5}]}',
    b'{"prompt": [[1, 2], [3]]}',
    b'{"system": [{"type": "text", "text": 5}], "messages": []}',
]


@pytest.mark.parametrize("kind", [*KINDS, "completions", "generate", "embeddings", ""])
def test_bad_bodies_are_counted_and_nothing_is_raised(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    doctor = Doctor()
    good = chat()
    total = 0
    for at, bad in enumerate(BAD):
        for session, bodies in ((2 * at, (bad, bad)), (2 * at + 1, (good, bad, good))):
            for body in bodies:
                doctor.seen(note(body, session, kind=kind, shared_tokens=1))
                total += 1
                while doctor.examine():
                    pass
    told = doctor.report()
    assert told["examined"] + told["skipped"] == total
    assert told["skipped_by"].get("defect", 0) == 0, caplog.text
    assert told["skipped"] > len(BAD)


def mangled(random: Random, value: Any) -> Any:
    """Some of it is of another type."""
    if random.random() < 0.03:
        return random.choice((None, 5, -1.5, True, "", "x", [], {}, [[]], {"text": 3}, [None], {"role": "system"}))
    if isinstance(value, dict):
        return {name: mangled(random, each) for name, each in value.items() if random.random() > 0.02}
    return [mangled(random, each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_of_all_types_are_examined_or_counted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    random, doctor, total = Random(kind), Doctor(memory=1 << 28, examples=True), 0
    for label in MAKERS:
        for pair in pairs(label, kind, 12, seed=8):
            session = total
            for body in pair:
                told = json.dumps(mangled(random, json.loads(body))).encode()
                examined(doctor, note(told, session, kind=kind, shared_tokens=random.choice((None, 1))))
                total += 1
    told = doctor.report()
    assert told["skipped_by"].get("defect", 0) == 0, caplog.text
    assert told["examined"] + told["skipped"] == total and min(told["examined"], told["skipped"]) > 20
    json.dumps(told)


async def test_the_task_examines_and_goes_on_after_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    doctor = Doctor(rate=1000.0)

    def fails(*told: Any) -> None:
        doctor._counted = lambda *told: None
        raise RuntimeError("a defect")

    doctor._counted = fails
    task = asyncio.create_task(doctor.run())
    for session in (1, 2):
        first, second = two()
        doctor.seen(first._replace(session=session))
        while doctor.report()["waiting"]:
            await asyncio.sleep(0.001)
        doctor.seen(second._replace(session=session))
        while doctor.report()["waiting"]:
            await asyncio.sleep(0.001)
    assert not task.done()
    task.cancel()
    told = doctor.report()
    assert told["skipped_by"] == {"defect": 1} and told["breaks"]["examined"] == 2
    assert SECRET not in caplog.text


async def test_at_most_so_many_examinations_a_second() -> None:
    doctor = Doctor(rate=20.0)
    for session in range(50):
        doctor.seen(note(chat(), session, new=True))
    task = asyncio.create_task(doctor.run())
    await asyncio.sleep(0.26)
    task.cancel()
    # The first at once; a slow machine makes fewer.
    assert 1 <= doctor.report()["examined"] <= 7


def test_every_relation_of_the_corpus_is_counted_as_such() -> None:
    doctor = Doctor(share=1.0, memory=1 << 30)
    session = 0
    for label in MAKERS:
        for kind in KINDS:
            for before, after in pairs(label, kind, 4, seed=3):
                session += 1
                examined(
                    doctor,
                    note(before, session, kind=kind, tenant=label),
                    note(after, session, kind=kind, tenant=label),
                )
    told = doctor.report()
    for label in MAKERS:
        found = {each["cause"] for each in told["findings"] if each["tenant"] == label and not each["between"]}
        assert found == ({label} if label in {cause.value for cause in Cause} else set()), label
    assert told["skipped"] == 0
    json.dumps(told)
