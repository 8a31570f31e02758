"""Causes of breaks over a generated corpus whose labels are known: precision and recall of each, in three dialects."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gateway.outline import Unread, outline
from gateway.prompt import Thinking
from kv_index.causes import Cause
from kv_index.lineage import Relation, compare
from tests.gateway import doctor_corpus
from tests.gateway.doctor_corpus import KINDS, MAKERS, pairs

COUNT = 100
"""Pairs of each relation in each dialect."""
LEAST = 0.95


def label_of(kind: str, before: bytes, after: bytes) -> str:
    found = compare(outline(kind, before, Thinking.STRIP), outline(kind, after, Thinking.STRIP))
    return found.relation.value if found.broken is None else found.broken.cause.value


def test_each_cause_is_found_and_no_other_is_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for label in MAKERS:
        for kind in KINDS:
            for before, after in pairs(label, kind, COUNT, seed=20261130):
                seen[label, label_of(kind, before, after)] += 1
    total = COUNT * len(KINDS)
    table = []
    for label in MAKERS:
        right = seen[label, label]
        told = sum(count for (_, found), count in seen.items() if found == label)
        table.append((label, right / max(told, 1), right / total))
    with capsys.disabled():
        print(f"\n{'relation':20} precision  recall   ({total} pairs each)")
        for label, precision, recall in table:
            print(f"{label:20} {precision:9.3f} {recall:7.3f}")
    for label, precision, recall in table:
        assert precision > LEAST and recall > LEAST, (label, {key: n for key, n in seen.items() if label in key})
    assert set(MAKERS) >= {cause.value for cause in Cause} - {"other"}


def test_the_corpus_knows_nothing_of_what_it_tests() -> None:
    text = Path(doctor_corpus.__file__).read_text()
    names = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert names.isdisjoint({"gateway", "kv_index", "policies", "tests"})


def test_thinking_is_stripped_only_where_the_template_strips_it() -> None:
    for kind in KINDS:
        for before, after in pairs("thinking_stripped", kind, 20, seed=1):
            for thinking in (Thinking.KEEP, Thinking.DROP):
                found = compare(outline(kind, before, thinking), outline(kind, after, thinking))
                assert found.relation is Relation.EXTENDS, (kind, thinking)


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("chat", b"not json", "body"),
        ("chat", b"[]", "body"),
        ("chat", b'{"messages": 3}', "body"),
        ("chat", b'{"messages": [3]}', "body"),
        ("messages", b'{"messages": [{"role": "user", "content": [1]}]}', "body"),
        ("responses", b'{"input": [{"type": "message", "content": 6}]}', "body"),
        ("responses", b'{"input": "x", "previous_response_id": "r"}', "stored"),
        ("completions", b'{"prompt": [1, 2]}', "ids"),
        ("generate", b'{"input_ids": [1, 2]}', "ids"),
        ("embeddings", b"{}", "kind"),
        ("chat", b'{"tools": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "deep"),
        ("chat", b"\xff\xfe", "body"),
    ],
)
def test_what_has_no_outline_says_why(kind: str, body: bytes, reason: str) -> None:
    with pytest.raises(Unread) as found:
        outline(kind, body, Thinking.STRIP)
    assert found.value.reason == reason


def test_how_json_is_spelled_is_no_break_but_the_order_of_a_schema_s_keys_is() -> None:
    one = b'{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f",'
    one += b'"description":"\\u4f60/","parameters":{"type":"object","properties":{"a":{},"b":{}}}}}]}'
    other = b'{ "tools": [ {"function": {"description": "\xe4\xbd\xa0\\/", "name": "f", "parameters":'
    other += b' {"type": "object", "properties": {"a": {}, "b": {} } } }, "type": "function" } ],'
    other += b' "messages": [ {"role":"user","content":[{"type":"text","text":"a"}]} ] }'
    assert label_of("chat", one, other) == "extends"
    moved = other.replace(b'"a": {}, "b": {}', b'"b": {}, "a": {}')
    assert label_of("chat", one, moved) == "tools_reordered"


def test_the_billing_line_of_a_client_is_no_break_where_engines_leave_it_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    said = [{"role": "user", "content": "hello"}]

    def body(system: object) -> bytes:
        return json.dumps({"system": system, "messages": said}).encode()

    blocks = [
        [{"type": "text", "text": line.format(at)}, {"type": "text", "text": "You help."}] for at in ("3f9a1", "00b2c")
    ]
    assert label_of("messages", body(blocks[0]), body(blocks[1])) == "extends"
    texts = [f"{line.format(at)}\nYou help." for at in ("3f9a1", "00b2c")]
    assert label_of("messages", body(texts[0]), body(texts[1])) == "extends"
    chats = [json.dumps({"messages": [{"role": "system", "content": text}, *said]}).encode() for text in texts]
    assert label_of("chat", chats[0], chats[1]) == "random_id"
