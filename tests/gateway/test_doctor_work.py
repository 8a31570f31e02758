"""What one step of an examination costs, whatever clients sent: counted in calls, not in seconds."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from random import Random
from time import perf_counter
from types import FrameType
from typing import Any

import pytest

from gateway.doctor import LARGEST, Doctor, Note
from gateway.prompt import Thinking
from kv_index.causes import MOST, Cause, Effort, difference

CALLS = 60_000
"""Of Python and C functions in one step: half a microsecond and less each, as these do."""
KIB = 500
Made = tuple[str, bytes, bytes]


def compact(told: object) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def chat(system: str = "s", said: list[dict[str, Any]] | None = None, **more: Any) -> bytes:
    messages = [{"role": "system", "content": system}, *(said or [{"role": "user", "content": "hello"}])]
    return compact({"model": "m", "messages": messages, **more})


def times(seed: int, count: int = 20_000) -> str:
    random = Random(seed)
    return "\n".join(f"2026-01-{random.randint(10, 28)} 10:{random.randint(10, 59)}:00 x" for _ in range(count))


def ids(seed: int, lines: int = 38, each: int = 400) -> str:
    random = Random(seed)
    return "\n".join(" ".join(f"{random.getrandbits(128):032x}" for _ in range(each)) for _ in range(lines))


def tools(seed: int, count: int) -> list[dict[str, Any]]:
    random = Random(seed)
    properties = {f"a{number}": {"type": "string"} for number in range(10)}
    return [
        {
            "type": "function",
            "function": {
                "name": f"t{number}",
                "description": f"{random.getrandbits(128):032x} at 2026-01-01 10:00:{random.randint(10, 59)}",
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for number in range(count)
    ]


def parts(seed: int, count: int) -> list[dict[str, str]]:
    random = Random(seed)
    return [{"type": "text", "text": f"{random.getrandbits(64):016x}"} for _ in range(count)]


def said(seed: int, count: int) -> list[dict[str, Any]]:
    random = Random(seed)
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": f"{random.getrandbits(128):032x}"} for at in range(count)]


def two(make: Callable[[int], bytes], kind: str = "chat") -> Made:
    return kind, make(1), make(2)


def listed(name: str, each: bytes) -> Made:
    """As many of ``each`` as there is room for."""
    many = b",".join([each] * (KIB * 1024 // (len(each) + 1)))
    return two(lambda seed: b'{"%b":[%b,{"a":%d}],"m":[]}' % (name.encode(), many, seed))


SHORT = [{"role": "user" if at % 2 else "assistant", "content": "ok"} for at in range(11_000)]
CALL = {"function": {"name": "x", "arguments": "{}"}}
HOSTILE: dict[str, Made] = {
    "changed timestamps": two(lambda seed: chat(times(seed))),
    "changed timestamps in a message": two(lambda seed: chat(said=[{"role": "user", "content": times(seed)}])),
    "hex ids": two(lambda seed: chat(ids(seed))),
    "a text of hex ids": two(lambda seed: compact({"prompt": ids(seed)}), "completions"),
    "700 changed tools": two(lambda seed: chat(tools=tools(seed, 700))),
    "200 changed tools": two(lambda seed: chat(tools=tools(seed, 200))),
    "60 changed tools": two(lambda seed: chat(tools=tools(seed, 60))),
    "tools in another order": two(lambda seed: chat(tools=tools(1, 700)[:: 2 * seed - 3])),
    "single letters": two(lambda seed: chat(" ".join("ab"[(at * seed) % 2] for at in range(250_000)))),
    "digits": two(
        lambda seed: chat(
            "\n".join(" ".join(f"{(at * seed) % 7}s" for at in range(number, number + 900)) for number in range(150))
        )
    ),
    "short lines": two(lambda seed: chat("\n".join(str(at + seed) for at in range(60_000)))),
    "whitespace": two(lambda seed: chat("a ".join([" " * seed] * 120_000))),
    "times and gaps": two(lambda seed: chat("\n".join("monday" + " " * 300 + f"x{seed}" for _ in range(1600)))),
    "parts of the system prompt": two(
        lambda seed: compact(
            {"messages": [{"role": "system", "content": parts(seed, 2000)}, {"role": "user", "content": "x"}]}
        )
    ),
    "parts of a message": two(lambda seed: chat(said=[{"role": "user", "content": parts(seed, 1000)}] * 2)),
    "messages": two(lambda seed: chat(said=said(seed, 2000))),
    "more messages": two(lambda seed: chat(said=said(seed, 6500))),
    "messages that are alike": ("chat", chat(said=SHORT), chat(said=[{"role": "user", "content": "z"}, *SHORT])),
    "calls": two(lambda seed: chat(said=[{"role": "assistant", "tool_calls": [CALL] * 400, "n": seed}] * 30)),
    "arguments": two(
        lambda seed: chat(
            said=[
                {"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps({"a": [[]] * 9000})}}]},
                {"role": "user", "content": f"{seed}"},
            ]
        )
    ),
    "parameters": two(lambda seed: chat(chat_template_kwargs={"a": [seed] * 240_000})),
    "no messages": listed("messages", b"{}"),
    "no tools": listed("tools", b"{}"),
    "other members": listed("junk", b"[]"),
    "messages of Anthropic's": two(
        lambda seed: compact({"system": times(seed, 4000), "tools": tools(seed, 400), "messages": said(seed, 1000)}),
        "messages",
    ),
    "input": two(lambda seed: compact({"instructions": ids(seed, 9), "input": said(seed, 1500)}), "responses"),
}


def note(kind: str, body: bytes, session: int, new: bool) -> Note:
    told = None if new else 100_000
    return Note("t", "m", session, kind, body, Thinking.KEEP, None, None, told, None if new else 10, new, 0.0)


class Counted:
    """Calls, while it is entered."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, told: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1


def steps(doctor: Doctor, counting: bool) -> list[float]:
    """Calls, or seconds, of each step of one examination."""
    found = []
    going = doctor._examination()
    while True:
        counted, begun = Counted(), perf_counter()
        if counting:
            sys.setprofile(counted)
        try:
            ended = next(going, going) is going
        finally:
            sys.setprofile(None)
        found.append(counted.calls if counting else perf_counter() - begun)
        if ended:
            return found


def worst(made: Made, counting: bool) -> float:
    """Of what such bodies cost: as two turns of a session, and as sessions that begin."""
    kind, before, after = made
    assert max(len(before), len(after)) <= LARGEST
    found: list[float] = []
    doctor = Doctor(memory=64 * 1024 * 1024)
    for body, new in ((before, True), (after, False)):
        doctor.seen(note(kind, body, 1, new))
        found += steps(doctor, counting)
    doctor = Doctor(memory=64 * 1024 * 1024)
    for number in range(9):
        body = (
            (before, after)[number % 2].replace(b"2026-01", b"2026-0%d" % (number or 1)).replace(b"ab", b"%dc" % number)
        )
        doctor.seen(note(kind, body, number, True))
        found += steps(doctor, counting)
    assert doctor.skipped["defect"] == 0
    return max(found)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_makes_a_step_long(name: str) -> None:
    assert worst(HOSTILE[name], counting=True) <= CALLS


def test_how_long_steps_are(capsys: pytest.CaptureFixture[str]) -> None:
    # What the collector walks here is the tests'.
    gc.disable()
    with capsys.disabled():
        print("\nlongest step of an examination, ms")
        for name, made in HOSTILE.items():
            longest = worst(made, counting=False)
            assert longest > 0
            print(f"{name:34} {len(made[1]) // 1024:4} KiB {longest * 1e3:6.1f}")
    gc.enable()


def test_what_is_compared_has_a_bound() -> None:
    for before, after in ((times(1), times(2)), (ids(1), ids(2)), ("a " * 8_000, "b " * 8_000)):
        effort = Effort()
        found = difference(before, after, effort)
        assert found is not None and found.at == next(at for at in range(99) if before[at] != after[at])
        assert 0 <= effort.left < MOST and effort.out


def test_what_is_like_all_that_was_looked_at_is_taken_for_the_same() -> None:
    found = difference(times(1), times(2))
    assert found is not None and found.cause is Cause.TIME
    # Of a few nothing follows: a line that is too long stands behind them.
    long = "z" * 20_000
    found = difference(f"{times(1, 3)}\n{long}", f"{times(2, 3)}\n{long[:-1]}y {long}")
    assert found is not None and found.cause is None


def test_where_a_prompt_broke_is_told_though_it_is_too_much_to_say_why() -> None:
    kind, before, after = HOSTILE["700 changed tools"]
    doctor = Doctor()
    for body, new in ((before, True), (after, False)):
        doctor.seen(note(kind, body, 1, new))
        assert doctor.examine()
    (finding,) = doctor.report()["findings"]
    assert (finding["cause"], finding["place"]["name"]) == ("tools_changed", "t0")
    assert finding["tokens_lost"] > 0
