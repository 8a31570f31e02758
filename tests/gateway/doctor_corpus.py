"""Pairs of prompts of one session whose relation is known, because it was made: bodies of three dialects, seeded.

Independent of what is tested: this module knows bodies and what agents do to them, and nothing of how breaks are found.
"""

from __future__ import annotations

import base64
import copy
import json
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

KINDS = ("chat", "messages", "responses")
WORDS = (
    "agent answer archive before branch build careful change check code command commit config continue data day decade "
    "default describe draft edit error every example facade file final find first folder format function history index "
    "inspect item keep line list log long look make march may message minutes module monday month never next now "
    "number often once open option order output path plan please policy print process project prompt question read report "
    "request rest result retry review run save search second section sentence session short show state step style sunday "
    "table task test text then tidy time today token tool turn update use user value verify version warn week word work "
    "write year base64 sha256 utf-8 python3 gpt-4 v1.2 3 10 42 2019 https://example.com/docs/page1"
).split()
SUMMARIES = (
    "This session is being continued from a previous conversation that ran out of context. {}",
    "Summary of the conversation so far: {}",
    "<summary>{}</summary> Please continue.",
    "Earlier messages were compacted. What matters: {}",
    "以下是之前对话的总结：{}",
)


def sentence(random: Random, least: int = 5, most: int = 16) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(least, most))).capitalize() + "."


def paragraph(random: Random, least: int = 2, most: int = 6) -> str:
    ends = random.choice((" ", "\n", "\n- "))
    return ends.join(sentence(random) for _ in range(random.randint(least, most)))


@dataclass
class Said:
    """One message."""

    role: str
    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    id: str = ""


@dataclass
class Told:
    """A prompt, in no dialect."""

    system: str
    tools: list[dict[str, Any]]
    said: list[Said]
    effort: str | None = None


def a_tool(random: Random, name: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key in random.sample(WORDS[:60], random.randint(3, 5)):
        about: dict[str, Any] = {"type": random.choice(("string", "integer")), "description": sentence(random)}
        if about["type"] == "integer":
            about |= {"minimum": random.randint(0, 9), "maximum": random.randint(10, 99)}
        properties[key] = about
    return {
        "name": name,
        "description": paragraph(random),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)[:2]},
    }


def call_id(random: Random) -> str:
    return "call_" + "".join(random.choices(string.ascii_letters + string.digits, k=16))


def round_(random: Random, tools: list[dict[str, Any]], steps: int | None = None) -> list[Said]:
    """A question, some calls, an answer."""
    found = [Said("user", paragraph(random))]
    for _ in range(random.randint(1, 3) if steps is None else steps):
        id_ = call_id(random)
        tool = random.choice(tools)
        calls = [(id_, tool["name"], {"path": sentence(random), "line": random.randint(1, 900)})]
        found.append(Said("assistant", random.choice(("", sentence(random))), paragraph(random), calls))
        found.append(Said("tool", paragraph(random, 2, 9), id=id_))
    found.append(Said("assistant", paragraph(random)))
    return found


def a_prompt(random: Random, rounds: int | None = None) -> Told:
    """It ends with a question, or with a tool's result."""
    names = random.sample(
        ("read_file", "write_file", "search", "run_tests", "grep", "fetch_page", "list_folder", "ask"), 5
    )
    tools = [a_tool(random, name) for name in names[: random.randint(2, 5)]]
    said: list[Said] = []
    for _ in range(random.randint(2, 4) if rounds is None else rounds):
        said += round_(random, tools)
    last = round_(random, tools, 1)
    said += last[: random.choice((1, 3))]
    return Told(paragraph(random, 4, 9), tools, said)


def grown(random: Random, told: Told) -> Told:
    """What its next request is if nothing breaks, in the same round."""
    more = copy.deepcopy(told)
    id_ = call_id(random)
    name = random.choice(told.tools)["name"] if told.tools else "read_file"
    more.said.append(Said("assistant", "", paragraph(random), [(id_, name, {"path": sentence(random)})]))
    more.said.append(Said("tool", paragraph(random), id=id_))
    return more


# -- values that change -----------------------------------------------------------------------------------------------

TIMES = (
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%SZ",
    "%Y-%m-%dT%H:%M:%S.%f+00:00",
    "%A, %B %d, %Y",
    "%a %b %d %H:%M:%S UTC %Y",
    "%a, %d %b %Y %H:%M:%S +0100",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y, %I:%M:%S %p",
    "%B %d, %Y at %I:%M %p",
    "%d.%m.%Y",
    "%Y-%m-%d",
    "%H:%M:%S",
    "%I:%M %p",
    "%Y年%m月%d日",
    "%Y/%m/%d %H:%M:%S",
    "%d %B %Y",
    "%Y%m%dT%H%M%SZ",
    "%s",
)


def time_pair(random: Random) -> tuple[str, str]:
    form = random.choice(TIMES)
    while True:
        begin = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=random.randrange(3 * 366 * 86_400))
        end = begin + timedelta(seconds=random.choice((1, 7, 61, 3_600, 86_400, 86_400 * 31)) * random.randint(1, 40))
        one, other = (str(int(at.timestamp())) if form == "%s" else at.strftime(form) for at in (begin, end))
        if one != other:
            return one, other


def one_id(random: Random, form: int) -> str:
    letters, digits = string.ascii_letters, string.digits
    if form == 0:
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    if form == 1:
        return random.randbytes(16).hex()
    if form == 2:
        return random.randbytes(4).hex()
    if form == 3:
        return "01J" + "".join(random.choices("0123456789ABCDEFGHJKMNPQRSTVWXYZ", k=23))
    if form == 4:
        return base64.b64encode(random.randbytes(24)).decode()
    if form == 5:
        return "req_" + "".join(random.choices(letters + digits, k=20))
    if form == 6:
        return "".join(random.choices(letters + digits + "_-", k=21)).strip("-_") or "a1B2c3D4"
    return "toolu_01" + "".join(random.choices(letters + digits, k=22))


def id_pair(random: Random) -> tuple[str, str]:
    form = random.randrange(11)
    if form == 8:
        number = random.randint(1, 5_000)
        word = random.choice(("Request #{}", "request {}", "Session: {}", "turn={}", "attempt {}"))
        return word.format(number), word.format(number + random.randint(1, 9))
    if form == 9:
        return str(random.randint(10**6, 10**9 - 1)), str(random.randint(10**6, 10**9 - 1))
    if form == 10:
        folder = "/tmp/tmp{}/out"
        return folder.format(one_id(random, 2)), folder.format(one_id(random, 2))
    return one_id(random, form), one_id(random, form)


def put_into(random: Random, text: str, one: str, other: str) -> tuple[str, str]:
    """The same text with either value at one place: a line of its own, or between two words."""
    label = random.choice(("", "Current: ", "now ", "id: ", "<env> ", "当前："))
    if random.random() < 0.4:
        lines = text.split("\n")
        at = random.randint(0, len(lines))
        return tuple("\n".join([*lines[:at], label + each, *lines[at:]]) for each in (one, other))  # type: ignore[return-value]
    words = text.split(" ")
    at = random.randint(0, len(words))
    return tuple(" ".join([*words[:at], label + each, *words[at:]]) for each in (one, other))  # type: ignore[return-value]


def edited(random: Random, text: str) -> str:
    """Some words are others: a sentence replaced, added or removed."""
    parts = text.split(". ")
    at = random.randrange(len(parts))
    while True:
        way = random.randrange(3)
        if way == 0:
            found = [*parts[:at], sentence(random, 3).rstrip("."), *parts[at + 1 :]]
        elif way == 1:
            found = [*parts[:at], sentence(random, 3).rstrip("."), *parts[at:]]
        else:
            found = [*parts[:at], *parts[at + 1 :]]
        new = ". ".join(found)
        if new.split() != text.split() and new:
            return new


def spaced(random: Random, text: str) -> str:
    """The same words with other whitespace."""
    while True:
        way = random.randrange(5)
        if way == 0:
            new = text + random.choice(("\n", " ", "\n\n"))
        elif way == 1:
            new = text.replace(" ", "  ", random.randint(1, 4))
        elif way == 2:
            new = text.replace("\n", "\r\n") if "\n" in text else "\n" + text
        elif way == 3:
            new = text.replace(". ", ".\n")
        else:
            new = " " + text
        if new != text:
            return new


# -- one pair of each relation ----------------------------------------------------------------------------------------

Pair = tuple[Told, Told]


def volatile(random: Random, pair: Callable[[Random], tuple[str, str]]) -> Pair:
    before = a_prompt(random)
    values = pair(random)
    place = random.choice(("system", "system", "system", "user", "tool"))
    if place == "system":
        before.system, new = put_into(random, before.system, *values)
        after = grown(random, before)
        after.system = new
    elif place == "user":
        before.said[0].text, new = put_into(random, before.said[0].text, *values)
        after = grown(random, before)
        after.said[0].text = new
    else:
        at = random.randrange(len(before.tools))
        before.tools[at]["description"], new = put_into(random, before.tools[at]["description"], *values)
        after = grown(random, before)
        after.tools[at]["description"] = new
    return before, after


def tools_reordered(random: Random) -> Pair:
    before = a_prompt(random)
    after = grown(random, before)
    while after.tools == before.tools and json.dumps(after.tools) == json.dumps(before.tools):
        if random.random() < 0.5:
            random.shuffle(after.tools)
        else:
            schema = random.choice(after.tools)["parameters"]
            names = list(schema["properties"])
            random.shuffle(names)
            schema["properties"] = {name: schema["properties"][name] for name in names}
    return before, after


def tools_changed(random: Random) -> Pair:
    before = a_prompt(random)
    after = grown(random, before)
    way = random.randrange(6)
    at = random.randrange(len(after.tools))
    if way == 0:
        after.tools.insert(at, a_tool(random, "another_one"))
    elif way == 1:
        del after.tools[at]
    elif way == 2:
        after.tools[at]["description"] = edited(random, after.tools[at]["description"])
    elif way == 3:
        after.tools[at]["parameters"]["properties"]["extra"] = {"type": "boolean"}
    elif way == 4:
        # Hard: a description changed, and so did the order.
        after.tools[at]["description"] = edited(random, after.tools[at]["description"])
        after.tools.reverse()
    else:
        # Hard: a time changed beside words.
        one, other = time_pair(random)
        text = after.tools[at]["description"]
        before.tools[at]["description"] = f"{text} Updated {one}."
        after.tools[at]["description"] = f"{edited(random, text)} Updated {other}."
    return before, after


def system_changed(random: Random) -> Pair:
    before = a_prompt(random)
    after = grown(random, before)
    way = random.randrange(6)
    if way == 0:
        # Hard: a year inside a sentence that was rewritten.
        before.system += f" Since {random.randint(2000, 2015)} the team has kept {sentence(random)}"
        after.system += f" From {random.randint(2016, 2026)} on the team has kept {sentence(random)}"
    elif way == 1:
        # Hard: a time changes, and so do words elsewhere.
        one, other = time_pair(random)
        before.system, after.system = f"Now: {one}.\n{before.system}", f"Now: {other}.\n{edited(random, after.system)}"
    elif way == 2:
        # Hard: whitespace and words.
        after.system = edited(random, spaced(random, after.system))
    elif way == 3:
        # Hard: a small number in an instruction.
        before.system += f" Try at most {random.randint(2, 4)} times."
        after.system += f" Try at most {random.randint(5, 9)} times."
    elif way == 4:
        after.system += " " + sentence(random)
    else:
        after.system = edited(random, after.system)
    return before, after


def history_rewritten(random: Random) -> Pair:
    before = a_prompt(random, rounds=4)
    after = grown(random, before)
    texts = [at for at, each in enumerate(before.said[:-3]) if each.text and at]
    at = random.choice(texts)
    way = random.randrange(4)
    if way == 0:
        after.said[at].text = edited(random, after.said[at].text)
    elif way == 1:
        # A call and its result are taken out.
        calls = [at for at, each in enumerate(before.said[:-4]) if each.calls]
        at = random.choice(calls)
        del after.said[at : at + 2]
    elif way == 2:
        results = [at for at, each in enumerate(before.said[:-3]) if each.role == "tool"]
        after.said[random.choice(results)].text = "[Old tool result content cleared]"
    else:
        # Hard: a time in it changes too.
        one, other = time_pair(random)
        before.said[at].text += f" At {one}."
        after.said[at].text = edited(random, after.said[at].text) + f" At {other}."
    return before, after


def history_compacted(random: Random) -> Pair:
    before = a_prompt(random, rounds=random.randint(4, 6))
    after = copy.deepcopy(before)
    users = [at for at, each in enumerate(before.said) if each.role == "user" and at]
    way = random.randrange(3)
    if way == 0:
        # Dropped from the front, up to a question.
        after.said = after.said[random.choice(users) :]
    elif way == 1:
        summary = Said("user", random.choice(SUMMARIES).format(paragraph(random, 2, 4)))
        after.said = [summary, *after.said[users[-1] + 1 :]] if random.random() < 0.5 else [summary]
    else:
        summary = Said("user", random.choice(SUMMARIES).format(paragraph(random, 1, 2)))
        after.said = [after.said[0], Said("assistant", "Understood."), summary, *after.said[users[-1] + 1 :]]
    if after.said[-1].role == "assistant":
        after.said.append(Said("user", sentence(random)))
    return before, grown(random, after) if random.random() < 0.7 else after


def thinking_stripped(random: Random) -> Pair:
    before = a_prompt(random)
    before.said += round_(random, before.tools)[: 3 if before.said[-1].role != "user" else 0]
    if before.said[-1].role == "user":
        before = grown(random, before)
    after = copy.deepcopy(before)
    after.said.append(Said("assistant", paragraph(random)))
    after.said.append(Said("user", sentence(random)))
    return before, after


def parameters_changed(random: Random) -> Pair:
    before = a_prompt(random)
    after = grown(random, before)
    before.effort, after.effort = random.sample(("low", "medium", "high", None), 2)
    if random.random() < 0.3:
        # Hard: words change behind it.
        after.system = edited(random, after.system)
    return before, after


def whitespace(random: Random) -> Pair:
    before = a_prompt(random)
    after = grown(random, before)
    way = random.randrange(4)
    if way == 0:
        schema = random.choice(after.tools)["parameters"]["properties"]
        number = next((each for each in schema.values() if "maximum" in each), None)
        if number is not None:
            number["maximum"] = float(number["maximum"])
            return before, after
        way = 1
    if way == 1:
        after.system = spaced(random, after.system)
    elif way == 2:
        tool = random.choice(after.tools)
        tool["description"] = spaced(random, tool["description"])
    else:
        message = random.choice([each for each in after.said[:-3] if each.text])
        message.text = spaced(random, message.text)
    return before, after


def extends(random: Random) -> Pair:
    before = a_prompt(random)
    return before, grown(random, before)


def retry(random: Random) -> Pair:
    before = a_prompt(random)
    after = copy.deepcopy(before)
    way = random.randrange(3)
    if way == 0:
        after.said[-1].text = edited(random, after.said[-1].text)
    elif way == 1:
        del after.said[-1]
        while after.said[-1].role == "assistant":
            del after.said[-1]
    else:
        # An earlier question is asked otherwise, and all behind it is gone.
        at = random.choice([at for at, each in enumerate(after.said) if each.role == "user" and at])
        after.said = [*after.said[:at], Said("user", sentence(random))]
    return before, after


def branch(random: Random) -> Pair:
    """A sub-agent, or a question beside the conversation, under the same name."""
    before, after = a_prompt(random), a_prompt(random, rounds=random.randint(0, 3))
    way = random.randrange(3)
    if way == 0:
        after.tools = copy.deepcopy(before.tools[:1])
    elif way == 1:
        after.system, after.tools = before.system, copy.deepcopy(before.tools)
        before.said = [*round_(random, before.tools), Said("user", sentence(random))]
    else:
        after.tools = []
        after.system = "Write a title of at most five words."
        after.said = [Said("user", paragraph(random))]
    return before, after


MAKERS: dict[str, Callable[[Random], Pair]] = {
    "time": lambda random: volatile(random, time_pair),
    "random_id": lambda random: volatile(random, id_pair),
    "tools_reordered": tools_reordered,
    "tools_changed": tools_changed,
    "system_changed": system_changed,
    "history_rewritten": history_rewritten,
    "history_compacted": history_compacted,
    "thinking_stripped": thinking_stripped,
    "parameters_changed": parameters_changed,
    "whitespace": whitespace,
    "extends": extends,
    "retry": retry,
    "branch": branch,
}


def pairs(label: str, kind: str, count: int, seed: int) -> Iterator[tuple[bytes, bytes]]:
    """``count`` pairs of bodies of that relation."""
    random = Random(f"{seed} {label} {kind}")
    for _ in range(count):
        before, after = MAKERS[label](random)
        yield body(kind, before), body(kind, after)


# -- bodies -----------------------------------------------------------------------------------------------------------


def body(kind: str, told: Told) -> bytes:
    return json.dumps({"chat": chat, "messages": messages, "responses": responses}[kind](told)).encode()


def chat(told: Told) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "system", "content": told.system}]
    for each in told.said:
        message: dict[str, Any] = {"role": each.role, "content": each.text}
        if each.thinking:
            message["reasoning_content"] = each.thinking
        if each.calls:
            message["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for id_, name, arguments in each.calls
            ]
        if each.role == "tool":
            message["tool_call_id"] = each.id
        said.append(message)
    effort = {"reasoning_effort": told.effort} if told.effort is not None else {}
    tools = {"tools": [{"type": "function", "function": tool} for tool in told.tools]} if told.tools else {}
    return {"model": "m", "messages": said, **tools, **effort}


def messages(told: Told) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for each in told.said:
        blocks: list[dict[str, Any]] = []
        if each.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": each.id, "content": each.text}]
        else:
            if each.thinking:
                blocks.append({"type": "thinking", "thinking": each.thinking, "signature": "s"})
            if each.text:
                blocks.append({"type": "text", "text": each.text})
            blocks += [{"type": "tool_use", "id": id_, "name": name, "input": args} for id_, name, args in each.calls]
        said.append({"role": "user" if each.role == "tool" else each.role, "content": blocks})
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in told.tools
    ]
    budget = {None: 0, "low": 1024, "medium": 4096, "high": 16384}[told.effort]
    thinking = {"thinking": {"type": "enabled", "budget_tokens": budget}} if budget else {}
    return {"model": "m", "max_tokens": 100, "system": told.system, "messages": said, "tools": tools, **thinking}


def responses(told: Told) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for each in told.said:
        if each.role == "tool":
            items.append({"type": "function_call_output", "call_id": each.id, "output": each.text})
            continue
        if each.thinking:
            thought = {"type": "reasoning_text", "text": each.thinking}
            items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [thought]})
        if each.text:
            kind = "output_text" if each.role == "assistant" else "input_text"
            content = [{"type": kind, "text": each.text}]
            items.append({"type": "message", "role": each.role, "content": content})
        items += [
            {"type": "function_call", "call_id": id_, "name": name, "arguments": json.dumps(arguments)}
            for id_, name, arguments in each.calls
        ]
    reasoning = {"reasoning": {"effort": told.effort}} if told.effort is not None else {}
    tools = [{"type": "function", **tool} for tool in told.tools]
    return {"model": "m", "instructions": told.system, "input": items, "tools": tools, **reasoning}
