"""What was found, each as what it was."""

from __future__ import annotations

import json

import pytest

from gateway.addresses import hidden
from gateway.dialects.fields import append
from tests.fuzz.targets import all_targets

TARGETS = all_targets()


@pytest.mark.parametrize("body", [b"{" + b" " * 100 + b"}", b" " * 100 + b"{}", b"{\n\n}\n", b'{"a":"{"}', b'{"a":{}}'])
def test_a_member_behind_nothing_has_no_comma_however_much_blank_there_is(body: bytes) -> None:
    assert json.loads(append(body, b'"b":1')) == {**json.loads(body), "b": 1}


def test_an_address_with_zeros_before_its_digits_is_one() -> None:
    assert hidden(b"at 10.10.00.1.", []) == b"at [worker]."


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("response", b"HTTP/1.1 199 OK\r\nContent-Length: 5\r\n\r\nhello", id="interim-with-a-body"),
        pytest.param("body", b"\t" * 140 + b"\n\n\n{}", id="blanks-before-nothing"),
        pytest.param("addresses", b"10.10.00.1\n.0.", id="zeros"),
    ],
)
def test_what_was_found(name: str, data: bytes) -> None:
    TARGETS[name].run(data)
