"""A real tokenizer and a real chat template: what is rendered, counted, generated and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine, EngineOptions
from load_tests.engine.options import OptionError
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import WEATHER, cached, chat, events as streamed, post, user
from tests.load_tests.engine.wiretap import happened

tokenizers = pytest.importorskip("tokenizers")

SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{%- if tools %}
<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == "wrong" %}{{ raise_exception("No such role.") }}{% endif %}
    {%- if message.skip %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning.strip() }}
</think>

{% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}
</function>
</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}
<think>
{% endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small byte-level BPE and a template in the manner of Qwen's."""
    folder = tmp_path_factory.mktemp("language")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(["the weather in the city is the same as the weather here " * 20], trainer)
    model.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIALS[:2]])
    model.add_tokens([tokenizers.AddedToken(text, special=False) for text in SPECIALS[2:]])
    model.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE)
    return {"tokenizer": str(folder / "tokenizer.json"), "template": str(folder / "template.jinja")}


def decode(files: dict[str, str], tokens: list[int]) -> str:
    model = tokenizers.Tokenizer.from_file(files["tokenizer"])
    return model.decode(tokens, skip_special_tokens=False)  # type: ignore[no-any-return]


async def rendered(http: aiohttp.ClientSession, engine: Engine, messages: list[Any], **fields: Any) -> dict[str, Any]:
    return await post(http, engine, "/tokenize", {"messages": messages, **fields})


async def test_messages_are_rendered_and_tokenized_by_the_files(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", **files)
    found = await rendered(http, engine, [user("héllo <b> 天气")], chat_template_kwargs={"enable_thinking": False})
    text = "<|im_start|>user\nhéllo <b> 天气<|im_end|>\n<|im_start|>assistant\n"
    assert decode(files, found["tokens"]) == text
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 32768
    answer = await chat(http, engine, [user("héllo <b> 天气")], chat_template_kwargs={"enable_thinking": False})
    assert answer["usage"]["prompt_tokens"] == found["count"]
    back = await post(http, engine, "/detokenize", {"tokens": found["tokens"]})
    assert back == {"prompt": text}
    plain = await rendered(http, engine, [user("hi")], add_generation_prompt=False)
    assert decode(files, plain["tokens"]) == "<|im_start|>user\nhi<|im_end|>\n"
    prompt = await post(http, engine, "/tokenize", {"prompt": "the weather"})
    assert decode(files, prompt["tokens"]) == "the weather"


async def test_tool_calls_reasoning_and_tools_reach_the_template(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", **files)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln", "days": [1, 2]}'}}
    said = {"role": "assistant", "content": None, "reasoning": "\nhm\n", "tool_calls": [call]}
    found = await rendered(http, engine, [user("q"), said], tools=[WEATHER], add_generation_prompt=False)
    text = decode(files, found["tokens"])
    assert '"description": "Weather of a city"' in text
    assert "<think>\nhm\n</think>" in text
    assert "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>" in text
    for name in ("reasoning", "reasoning_content"):
        answer = await chat(http, engine, [user("q"), {"role": "assistant", "content": "", name: "hm"}])
        count = (await rendered(http, engine, [user("q"), {**said, "tool_calls": [], "reasoning": "hm"}]))["count"]
        assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "wrong", "content": "x"}, "No such role."),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "no JSON"),
    ],
)
async def test_what_a_template_refuses_is_the_clients_fault(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str], message: dict[str, Any], words: str
) -> None:
    engine = await start("vllm", **files)
    async with http.post(engine.url + "/v1/chat/completions", json={"messages": [message]}) as answer:
        assert answer.status == 400
        assert words in (await answer.json())["error"]["message"]


async def test_a_reply_can_be_forced_to_the_token(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", **files)
    text = "Let me see.\n</think>\n\nThe weather 天气 is fine.<|im_end|>"
    answer = await chat(http, engine, [user("q")], sim={"reply": {"text": text}}, return_token_ids=True)
    (choice,) = answer["choices"]
    assert decode(files, choice["token_ids"]) == text
    assert decode(files, answer["prompt_token_ids"]).endswith("<|im_start|>assistant\n<think>\n")
    assert choice["message"]["reasoning"] == "Let me see.\n"
    assert choice["message"]["content"] == "\n\nThe weather 天气 is fine."
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    short = await chat(http, engine, [user("q")], sim={"reply": {"text": text}}, max_tokens=3)
    assert short["choices"][0]["finish_reason"] == "length"
    async with http.post(
        engine.url + "/v1/chat/completions", json={"messages": [user("q")], "sim": {"reply": 1}}
    ) as bad:
        assert bad.status == 400


async def test_a_forced_call_is_found_again_when_it_is_sent_back(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    for dialect, name in (("vllm", "reasoning"), ("sglang", "reasoning_content")):
        engine = await start(dialect, block_size=1, **files)
        reply = {
            "reasoning": "I need a tool.",
            "tool_calls": [{"name": "get_weather", "arguments": {"city": "12", "days": 3}}],
        }
        fields: dict[str, Any] = {"tools": [WEATHER]}
        answer = await chat(http, engine, [user("q")], sim={"reply": reply}, **fields)
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message[name] == "I need a tool.\n"
        function = message["tool_calls"][0]["function"]
        assert function["name"] == "get_weather"
        assert json.loads(function["arguments"]) == {"city": "12", "days": 3}, "by the tool's schema"
        history = [user("q"), message, {"role": "tool", "content": "rain"}]
        after = await chat(http, engine, history, **fields)
        assert cached(after) == answer["usage"]["total_tokens"] - 1


async def test_streamed_ids_are_those_of_the_whole_answer(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", **files)
    call = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
    for text in ("hm\n</think>\n\nfine 天气.", f"hm\n</think>\n\n{call}", "no end of thought"):
        body = {"messages": [user("q")], "sim": {"reply": text}, "return_token_ids": True}
        whole = await post(http, engine, "/v1/chat/completions", body)
        chunks = (await streamed(http, engine, "/v1/chat/completions", body))[:-1]
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids") or []]
        assert ids == whole["choices"][0]["token_ids"]
        assert decode(files, ids) == text + "<|im_end|>"
        message = whole["choices"][0]["message"]
        for field in ("reasoning", "content"):
            shown = "".join(choice["delta"].get(field) or "" for choice in choices)
            assert shown.strip() == (message[field] or "").strip()
        calls = [part for choice in choices for part in choice["delta"].get("tool_calls") or []]
        arguments = "".join(part["function"].get("arguments", "") for part in calls)
        assert arguments == "".join(made["function"]["arguments"] for made in message["tool_calls"])


async def test_completions_take_text_and_ids_and_tell_ids(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", **files)
    ids = (await post(http, engine, "/tokenize", {"prompt": "the city"}))["tokens"]
    for prompt in ("the city", ids):
        body = {"prompt": prompt, "sim": {"reply": "is here"}, "return_token_ids": True, "max_tokens": 50}
        (choice,) = (await post(http, engine, "/v1/completions", body))["choices"]
        assert choice["prompt_token_ids"] == ids
        assert (choice["text"], decode(files, choice["token_ids"])) == ("is here", "is here<|im_end|>")
        chunks = (await streamed(http, engine, "/v1/completions", body))[:-1]
        parts = [part for chunk in chunks for part in chunk["choices"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part["prompt_token_ids"] for part in parts if part["prompt_token_ids"]] == [ids]


async def test_unscripted_replies_are_in_the_models_tokens_too(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", block_size=1, **files)
    messages: list[Any] = [user("tell me")]
    known = 0
    for turn in range(3):
        answer = await chat(http, engine, messages, tools=[WEATHER], tool_choice="required" if turn else "auto")
        assert cached(answer) >= known - 1
        known = answer["usage"]["total_tokens"]
        assert answer["choices"][0]["message"]["reasoning"]
        messages += [answer["choices"][0]["message"], {"role": "tool", "content": "go on"}]


async def test_events_have_the_models_tokens(start: Start, http: aiohttp.ClientSession, files: dict[str, str]) -> None:
    engine = await start("vllm", events=True, block_size=4, **files)
    answer = await chat(http, engine, [user("the weather")], sim={"reply": "</think>ok"}, return_token_ids=True)
    told = [token for event in await happened(engine) for token in event["token_ids"]]
    known = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    assert told == known[: len(told)]
    assert len(told) == (len(known) - 1) // 4 * 4


async def test_sglang_renders_a_field_more_for_each_tool(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    texts = []
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect, **files)
        texts.append(decode(files, (await rendered(http, engine, [user("q")], tools=[WEATHER]))["tokens"]))
    assert texts[1] == texts[0].replace("}\n<|im_end|>", ', "defer_loading": null}\n<|im_end|>') or (
        texts[1].replace(', "defer_loading": null', "") == texts[0] != texts[1]
    )


async def test_the_engines_own_language_takes_scripts_as_well(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("vllm")
    reply = {"content": "first", "tool_calls": [{"name": "get_weather", "arguments": {"city": "x"}}]}
    answer = await chat(http, engine, [user("q")], tools=[WEATHER], sim={"reply": reply})
    message = answer["choices"][0]["message"]
    assert message["content"].strip() == "first"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "x"}
    anthropic = await post(
        http, engine, "/v1/messages", {"messages": [user("q")], "max_tokens": 50, "sim": {"reply": "so be it"}}
    )
    assert anthropic["content"] == [{"type": "text", "text": "so be it"}]


async def test_messages_have_a_block_for_thinking_text_and_each_call(
    start: Start, http: aiohttp.ClientSession, files: dict[str, str]
) -> None:
    engine = await start("vllm", block_size=1, **files)
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("a", "b")]
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    body: dict[str, Any] = {"messages": [user("q")], "max_tokens": 400, "tools": [tool]}
    script = {"sim": {"reply": {"reasoning": "hm", "content": "so:", "tool_calls": calls}}}
    whole = await post(http, engine, "/v1/messages", {**body, **script})
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "a"}, {"city": "b"}]
    assert whole["stop_reason"] == "tool_use"
    found = await streamed(http, engine, "/v1/messages", {**body, **script})
    begun = [item["content_block"]["type"] for item in found if item["type"] == "content_block_start"]
    assert [kind for kind in begun if kind != "text"] == ["thinking", "tool_use", "tool_use"]
    deltas = [item["delta"] for item in found if item["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == whole["content"][0]["thinking"]
    assert sum(item["type"] == "content_block_stop" for item in found) == len(begun)
    for block in whole["content"]:
        if "text" in block:
            block["text"] = block["text"].strip("\n")
    history = [user("q"), {"role": "assistant", "content": whole["content"]}, user("go on")]
    after = await post(http, engine, "/v1/messages", {**body, "messages": history})
    usage = whole["usage"]
    prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert after["usage"]["cache_read_input_tokens"] > prompt, "thinking is rendered again"


@pytest.mark.parametrize("name", ["tokenizer", "template"])
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=name):
        EngineOptions(**{name: str(tmp_path / "nothing")})
