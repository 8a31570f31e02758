"""The tokenizer and the template: invertible, and a conversation only grows."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, strategies as st

from load_tests.engine.replies import Wanted, compose
from load_tests.engine.template import render, render_tokens
from load_tests.engine.tokens import detokenize, pieces_of, tokenize
from tests.load_tests.engine.talk import LONG, WEATHER, user

TEXT = st.text(alphabet=st.sampled_from(list("abz XY09.,{}\"'<|>\n\té漢😀_")), max_size=60)


@given(text=TEXT)
def test_tokens_give_the_text_back(text: str) -> None:
    tokens = tokenize(text)
    assert detokenize(tokens) == text
    assert all(0 <= token < 2**32 for token in tokens)


@given(text=TEXT, data=st.data())
def test_cutting_at_a_piece_changes_no_piece_before_it(text: str, data: st.DataObject) -> None:
    pieces = pieces_of(text.replace("|", ""))
    count = data.draw(st.integers(0, len(pieces)))
    assert pieces_of("".join(pieces[:count])) == pieces[:count]


def test_prose_is_about_four_bytes_a_token() -> None:
    assert 3.5 <= len(LONG) / len(tokenize(LONG)) <= 5.0


@given(text=TEXT, more=TEXT)
def test_one_more_message_only_extends_the_prompt(text: str, more: str) -> None:
    messages = [{"role": "system", "content": text}, user(more)]
    before = render_tokens(messages, [WEATHER], generate=False)
    after = render_tokens([*messages, user(text)], [WEATHER], generate=False)
    assert after[: len(before)] == before


@given(seed=st.integers(0, 10_000), limit=st.integers(1, 120))
def test_what_was_generated_is_found_again_when_it_comes_back(seed: int, limit: int) -> None:
    messages = [user("hello")]
    prompt = render_tokens(messages)
    reply = compose(prompt, Wanted(max_tokens=limit), seed=seed)
    assert len(reply.tokens) == len(reply.parts) <= limit
    assert (reply.finish == "length") == (len(reply.tokens) == limit and reply.tokens[-1] != 0x8001)
    assert "".join(part.text for part in reply.parts) == reply.text
    back = render_tokens([*messages, {"role": "assistant", "content": reply.content}, user("and?")])
    assert back[: len(prompt) + len(reply.tokens)] == prompt + reply.tokens


def test_a_generated_tool_call_is_found_again_too() -> None:
    messages = [user("weather?")]
    prompt = render_tokens(messages, [WEATHER])
    reply = compose(prompt, Wanted(max_tokens=500, tools=[WEATHER], choice="required"))
    call = reply.calls[0]
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "type": "function", "function": {
        "name": call.name, "arguments": call.arguments}}]}  # fmt: skip
    back = render_tokens([*messages, said, {"role": "tool", "tool_call_id": call.id, "content": "rain"}], [WEATHER])
    assert back[: len(prompt) + len(reply.tokens)] == prompt + reply.tokens


def test_replies_are_the_same_in_every_process() -> None:
    code = "from load_tests.engine.replies import *; print(compose([1, 2, 3], Wanted(max_tokens=30)).text)"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {compose([1, 2, 3], Wanted(max_tokens=30)).text + "\n"}


def test_replies_differ_by_prompt_seed_and_choice() -> None:
    wanted = Wanted(max_tokens=30)
    texts = [
        compose([1, 2, 3], wanted).text,
        compose([1, 2, 4], wanted).text,
        compose([1, 2, 3], wanted, seed=1).text,
        compose([1, 2, 3], wanted, index=1).text,
        compose([1, 2, 3], Wanted(max_tokens=30, seed=5)).text,
    ]
    assert len(set(texts)) == len(texts)


def test_tools_come_before_everything_else() -> None:
    text = render([{"role": "system", "content": "be kind"}, user("hi")], [WEATHER])
    assert text.index("get_weather") < text.index("be kind") < text.index("hi")
    assert text.endswith("<|im_start|>assistant\n")
