"""Where prompts break: places to the character, relations, sizes, and prompts that are one text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kv_index.causes import Cause, common, difference
from kv_index.lineage import Relation, between, compare
from kv_index.outlines import Message, Outline, Part, Piece, Place, Tool, weight

WORDS = st.lists(
    st.sampled_from("plan the next step of this task and then say what you did, please. 你好 é".split()), max_size=30
)
TEXTS = st.lists(WORDS.map(" ".join), min_size=1, max_size=6).map("\n".join)
VALUES = st.sampled_from(
    [
        ("2026-11-30T13:05:31Z", "2026-11-30T13:05:32Z", Cause.TIME),
        ("Monday, November 30, 2026", "Tuesday, December 1, 2026", Cause.TIME),
        ("9:59 AM", "10:00 AM", Cause.TIME),
        ("Mon Nov 30 13:05:31 UTC 2026", "Tue Dec  1 02:05:31 UTC 2026", Cause.TIME),
        ("1796043931", "1796043945", Cause.TIME),
        ("3fa85f64-5717-4562-b3fc-2c963f66afa6", "9be85f64-0717-4ad2-a3fc-cc963f66afa9", Cause.ID),
        ("req_8fK2mQ9xLp", "req_Xy71bb0Qwe", Cause.ID),
        ("01HF3ZQJ5X8T2W4V6Y7B9C0D1E", "01HG00QJ5Y0A2W4V6Y7B9C0D1E", Cause.ID),
        ("9f86d081884c7d65", "a3c1e0991b2d4f77", Cause.ID),
    ]
)


def user(text: str) -> Message:
    return Message("user", (Piece(Part.TEXT, text),))


def answer(text: str, thinking: str = "") -> Message:
    pieces = [Piece(Part.THINKING, thinking)] if thinking else []
    return Message("assistant", (*pieces, Piece(Part.TEXT, text)))


def tool(name: str, description: str = "does it") -> Tool:
    value = {"name": name, "description": description}
    return Tool(name, json.dumps(value), value)


def prompt(system: str = "Be kind.", said: tuple[Message, ...] = (user("hello"),), **more: Any) -> Outline:
    return Outline(system=[system], messages=said, first=1, **more)


@st.composite
def inserted(draw: st.DrawFn) -> tuple[str, str, int, Cause]:
    """A text with one of two values in it, and where."""
    one, other, cause = draw(VALUES)
    text = draw(TEXTS)
    gaps = [0, *[at + 1 for at, letter in enumerate(text) if letter in " \n"]]
    at = draw(st.sampled_from(gaps))
    return f"{text[:at]}{one} {text[at:]}", f"{text[:at]}{other} {text[at:]}", at, cause


@given(inserted())
def test_a_value_is_found_to_the_character(made: tuple[str, str, int, Cause]) -> None:
    one, other, at, cause = made
    found = difference(one, other)
    assert found is not None and (found.cause, found.start) == (cause, at)
    assert found.at == common(one, other) >= at


@given(inserted(), st.sampled_from(["system", "message"]), TEXTS)
def test_a_place_is_right_wherever_it_is(made: tuple[str, str, int, Cause], where: str, more: str) -> None:
    one, other, at, cause = made
    tail = (answer("yes"), user(more))
    if where == "system":
        before, after = prompt(one), prompt(other, (user("hello"), *tail))
        place, shared = Place(Part.SYSTEM, "", None, at), 0
    else:
        before = prompt(more, (user("hello"), answer("ok"), user(one)))
        after = prompt(more, (user("hello"), answer("ok"), user(other), *tail))
        place, shared = Place(Part.TEXT, "user", 3, at, "messages"), weight(more) + weight("hellook")
    found = compare(before, after).broken
    assert found is not None
    assert (found.cause, found.place) == (cause, place)
    assert found.shared == shared + weight(one[: common(one, other)])
    assert (found.before, found.after) == (before.size, after.size)


@given(inserted(), st.integers(0, 3))
def test_a_value_in_a_tool_is_found_in_its_json(made: tuple[str, str, int, Cause], number: int) -> None:
    one, other, at, cause = made
    tools = [[tool(f"t{each}", text if each == number else "does it") for each in range(4)] for text in (one, other)]
    found = compare(prompt(tools=tools[0]), prompt(tools=tools[1])).broken
    assert found is not None
    text = tools[0][number].text
    start = text.index('"description": "') + 16 + len(json.dumps(one[:at])) - 2
    assert (found.cause, found.place) == (cause, Place(Part.TOOL, f"t{number}", number, start))
    assert found.shared == sum(weight(each.text) for each in tools[0][:number]) + common(text, tools[1][number].text)


@given(TEXTS, TEXTS)
def test_equal_texts_do_not_differ_and_words_are_no_values(one: str, other: str) -> None:
    assert difference(one, one) is None
    found = difference(one, other)
    if one != other:
        assert found is not None
        same = one.split() == other.split()
        assert found.cause is (Cause.WHITESPACE if same else None)
        assert found.at == found.start == common(one, other)


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ("Copyright 2025 by us", "Copyright 2026 by us", Cause.TIME),
        ("since 2019 we did", "since 2020 we did", None),
        ("Today is Monday.", "Today is Tuesday.", Cause.TIME),
        ("Deploy on Monday.", "Deploy on Friday.", None),
        ("the sprint of May", "the sprint of June", None),
        ("log-2026-11-30.txt", "log-2026-12-01.txt", Cause.TIME),
        ("version 1.2.34", "version 1.2.35", None),
        ("at most 3 times", "at most 5 times", None),
        ("Request #3", "Request #4", Cause.ID),
        ("attempt 2019", "attempt 2020", Cause.ID),
        ("150000 tokens left", "14000 tokens left", Cause.ID),
        ("in /tmp/tmpab_cdef/x", "in /tmp/tmpzzkkqa/x", Cause.ID),
        ("gpt-4 or so", "gpt-5 or so", None),
        ("uses sha256 here", "uses sha512 here", None),
        ("a facade of it", "a decade of it", None),
        ("2 minutes ago", "3 minutes ago", Cause.TIME),
        ("a\tb", "a b ", Cause.WHITESPACE),
        ("ab", "a b", None),
        ("", "x", None),
        ("", " ", Cause.WHITESPACE),
        ("2026-11-30 and more", "2026-12-01 and less", None),
        ("2026-11-30\nsecond line", "2026-12-01\nsecond  line", None),
        ("at 2026-11-30 by 9f86d081", "at 2026-12-01 by 77aed081", Cause.TIME),
    ],
)
def test_what_counts_as_which(one: str, other: str, cause: Cause | None) -> None:
    for left, right in ((one, other), (other, one)):
        found = difference(left, right)
        assert found is not None and found.cause is cause, (left, right)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "# Current Time\n11/30/2026, 1:05:31 PM (Europe/Berlin)",
            "# Current Time\n12/1/2026, 11:25:01 AM (Europe/Berlin)",
        ),
        ("Heute ist Montag, 30. November 2026, 13:05 Uhr", "Heute ist Dienstag, 1. Dezember 2026, 09:05 Uhr"),
        ("Nous sommes le 30 novembre 2026 à 13:05", "Nous sommes le 1 décembre 2026 à 09:15"),
        ("es 30 de noviembre de 2026", "es 1 de diciembre de 2026"),
        ("现在是 2026 年 11 月 30 日 13 时 05 分", "现在是 2026 年 12 月 1 日 9 时 15 分"),
        ("今日は2026年11月30日(月)です", "今日は2026年12月1日(火)です"),
        ("오늘은 2026년 11월 30일", "오늘은 2026년 12월 1일"),
        ("[30/Nov/2026:13:05:31 +0000] GET", "[01/Dec/2026:14:15:31 +0000] GET"),
        ("Nov 30 13:05:31 host", "Dec  1 14:15:00 host"),
        ("System time: 2026-11-30T13:05:31.123456+00:00", "System time: 2026-11-30T13:05:32+00:00"),
        ("week 2026-W49-1", "week 2026-W50-3"),
        ("30-Nov-2026", "01-Dec-2026"),
        ("it's 7 o'clock", "it's 8 o'clock"),
        ("now=1796043931123", "now=1796043999999"),
    ],
)
def test_times_as_agents_and_people_write_them(one: str, other: str) -> None:
    found = difference(f"{one} so", f"{other} so")
    assert found is not None and found.cause is Cause.TIME


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("usage: 12345/200000; 187655 remaining", "usage: 22345/200000; 177655 remaining"),
        (
            "x-anthropic-billing-header: cc_version=2.1; cch=3f9a1;",
            "x-anthropic-billing-header: cc_version=2.1; cch=00b2c;",
        ),
        (
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-aaf92f3577b34da6a3ce929d0e0e4799-11f067aa0ba902c8-01",
        ),
        ("pod api-7d9f8b6c5d-x2x4q", "pod api-6c8e7a5b4c-9zk2p"),
        ("chatcmpl-9abcDEFghi23JKL", "chatcmpl-0xyzABCdef45MNO"),
        ('{"request_id": 17}', '{"request_id": 18}'),
        ("session_id: ses_abcDEF", "session_id: ses_XyzQrs"),
        ("user 982374987234987234", "user 182374987234987111"),
    ],
)
def test_ids_as_programs_make_them(one: str, other: str) -> None:
    found = difference(f"{one} so", f"{other} so")
    assert found is not None and found.cause is Cause.ID


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("use Python 3.11", "use Python 3.12"),
        ("dir src/a1/b.py", "dir src/c2/d.py"),
        ("temperature 0.7", "temperature 0.2"),
        ("host 10.0.0.1", "host 10.0.0.2"),
        ("cafe or bar", "face or bar"),
        ("RFC 2616 says", "RFC 9110 says"),
        ("version v2.3.1-rc1", "version v2.3.1-rc2"),
        ("weight 120000 kg", "weight 340000 kg"),
        ("a 10:1 ratio", "a 12:1 ratio"),
        ("name: John", "name: Mary"),
    ],
)
def test_words_and_numbers_that_somebody_wrote(one: str, other: str) -> None:
    found = difference(one, other)
    assert found is not None and found.cause is None


def test_long_lines_cost_little() -> None:
    # By work, not by a clock: what is equal is not looked at.
    text = "word " * 200_000
    found = difference(f"{text}2026-11-30 {text}", f"{text}2026-12-01 {text}")
    assert found is not None and (found.cause, found.start) == (Cause.TIME, 1_000_000)
    assert difference("x " * 50_000, "y " * 50_000) == (None, 0, 0)


def test_relations() -> None:
    first, second = user("What is the weather today in the capital?"), user("And what will it be tomorrow?")
    one = prompt(said=(first, answer("fine"), second))
    assert compare(one, one).relation is Relation.EXTENDS
    assert (
        compare(one, prompt(said=(first, answer("fine"), second, answer("x"), user("y")))).relation is Relation.EXTENDS
    )
    assert compare(one, prompt(said=(first, answer("fine"), user("Or else?")))).relation is Relation.RETRY
    assert compare(one, prompt(said=(first,))).relation is Relation.RETRY
    assert compare(one, prompt("Be terse.", (user("Other."),))).relation is Relation.BRANCH
    assert compare(one, prompt("Be terse.", one.messages)).broken is not None


def test_another_conversation_is_not_blamed_for_what_many_say() -> None:
    short = user("<returncode>0</returncode>\n<output>\n</output>")
    one = prompt(
        "You code.", (user("Fix the parser of dates, it fails. " * 9), answer("Now"), short), tools=[tool("a")]
    )
    other = prompt(
        "You code.", (user("Write a long poem about the sea. " * 9), answer("Yes"), short), tools=[tool("b")]
    )
    assert compare(one, other).relation is Relation.BRANCH
    assert compare(one, prompt("You code.", one.messages, tools=[tool("b")])).relation is Relation.BROKEN


def test_thinking_comes_back_only_when_a_question_is_taken_back() -> None:
    asked = (user("a"), answer("b", "hm"), user("c"))
    before, after = prompt(said=asked, shown=2), prompt(said=asked[:2], shown=0)
    assert compare(before, after).relation is Relation.RETRY
    found = compare(after, before).broken
    assert found is not None
    assert (found.cause, found.place) == (Cause.THINKING, Place(Part.THINKING, "assistant", 2, 0, "messages"))


def test_sections_break_in_the_order_in_which_they_are_rendered() -> None:
    one = prompt("a 2026-11-30", tools=[tool("x"), tool("y")], parameters={"reasoning_effort": '"low"'})
    moved = prompt("a 2026-12-01", tools=[tool("y"), tool("x")], parameters={"reasoning_effort": '"low"'})
    found = compare(one, moved).broken
    assert found is not None and found.cause is Cause.TOOLS_REORDERED and found.place.name == "x"
    other = prompt("a 2026-12-01", tools=[tool("y"), tool("x")], parameters={"reasoning_effort": '"high"'})
    found = compare(one, other).broken
    assert found is not None and found.cause is Cause.PARAMETERS and found.shared == 0


def test_between_sessions_only_what_was_meant_to_be_equal_counts() -> None:
    one = prompt("You help. It is 2026-11-30.", tools=[tool("x"), tool("y")])
    later = prompt("You help. It is 2026-12-01.", (user("else"),), tools=[tool("x"), tool("y")])
    found = between(one, later)
    assert found is not None and (found.cause, found.place.offset) == (Cause.TIME, 16)
    assert between(one, prompt("You help. It is 2026-11-30.", (user("z"),), tools=one.tools)) is None
    assert between(one, prompt("You sell. It is 2026-12-01.", tools=one.tools)) is None
    assert between(one, prompt("You help. It is 2026-12-01.", tools=[tool("x")])) is None
    both = between(one, prompt("You help. It is 2026-12-01.", tools=[tool("y"), tool("x")]))
    assert both is not None and both.cause is Cause.TOOLS_REORDERED


def test_prompts_that_are_one_text() -> None:
    head = "system: be kind\nnow: 2026-11-30\n" + "rules\n" * 20
    one = Outline(text=head + "user: hi")
    assert compare(one, Outline(text=head + "user: hi\nassistant: yes")).relation is Relation.EXTENDS
    assert compare(one, Outline(text=head + "user: hello")).relation is Relation.RETRY
    assert compare(one, Outline(text="quite another\nprompt")).relation is Relation.BRANCH
    found = compare(one, Outline(text=head.replace("-30", "-29") + "user: hi\nassistant: yes")).broken
    assert found is not None and (found.cause, found.place.offset) == (Cause.TIME, 21)
    assert str(found.place) == "character 21 of the prompt"
    long = Outline(text=head + "a\nb\nc\nd")
    found = compare(long, Outline(text=head + "a\nz\nc\ne\nf")).broken
    assert found is not None and (found.cause, found.place.offset) == (Cause.OTHER, len(head) + 2)


def test_places_in_words() -> None:
    assert str(Place(Part.SYSTEM, "", None, 214)) == "character 214 of the system prompt"
    assert str(Place(Part.SYSTEM, "", 1, 0)) == "character 0 of part 1 of the system prompt"
    assert str(Place(Part.TOOL, "grep", 2)) == "tools[2] (grep)"
    assert str(Place(Part.PARAMETER, "documents")) == "the parameter documents"
    assert str(Place(Part.RESULT, "tool", 4, 7, "messages")) == "character 7 of the tool result of messages[4] (tool)"
    assert str(Place(Part.CALL, "assistant")) == "the tool call of an earlier message (assistant)"
