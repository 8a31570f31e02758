"""Whatever a file says, it is read or refused with a reason: never anything else, and no secret in the reason."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from gateway.config import Config, ConfigError, Secret, parse

SECRET = "s3cret-of-the-environment"
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.sampled_from(
        ["", "x", "30s", "64M", "round_robin", "http://h:1", "http://h:99999", "${SECRET}", "/x", "blake2b:00:", "."]
    ),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


def like(kind: Any) -> st.SearchStrategy[Any]:
    """What looks like a ``kind``, more or less: its keys, often with values of the right shape."""
    hints = get_type_hints(kind)
    parts = {each.name: st.one_of(ANYTHING, _value(hints[each.name])) for each in fields(kind)}
    return st.fixed_dictionaries({}, optional=parts)


def _value(hint: Any) -> st.SearchStrategy[Any]:
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            one = like(option)
            if getattr(hint, "__origin__", None) is list:
                return st.lists(one, max_size=3)
            return (
                st.dictionaries(st.text(max_size=5), one, max_size=2)
                if getattr(hint, "__origin__", None) is dict
                else one
            )
    return ANYTHING


def read(text: str) -> None:
    try:
        parse(text, {"SECRET": SECRET}, "w.yaml")
    except ConfigError as refusal:
        problems = refusal.problems
    else:
        return
    assert problems
    for problem in problems:
        assert problem.message
        assert SECRET not in str(problem)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(like(Config))
def test_what_looks_like_a_configuration(says: dict[str, Any]) -> None:
    read(yaml.safe_dump(says, allow_unicode=True))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("abckeys :-[]{}&*!|>'\"#%@`,?\n\t \\0${}é\x00"), max_size=60))
def test_what_does_not(text: str) -> None:
    read(text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=80))
def test_text_of_any_kind(text: str) -> None:
    read(text)


@pytest.mark.parametrize("value", [SECRET, "s3cret\nof two lines", "s3cret'\"quoted"])
def test_a_secret_in_the_wrong_place_is_told_by_its_variable_s_name(value: str) -> None:
    """Wherever a variable may stand, alone and beside something."""
    places = [
        "drain: %",
        "listen: {port: %, max_body: %, tls: {cert: %, key: %, client_ca: %}}",
        "policy: %",
        "anonymous: %",
        "models: {m: {policy: %, thinking: %, checkpoints: %, tokenizer: %, template: %, aliases: [m, %]}}",
        "policies: {p: {name: %}, q: {name: random, x: %}}",
        "workers: [{url: %, role: %, engine: %, protocol: %, bootstrap: %, events: {endpoint: %}}]",
        "tenants: [{name: %, policy: %, key_files: [%], isolation: %, canonical: [%], subjects: [%], claims: [%]}]",
        "tenants: [{name: a, keys: [k], aliases: {x: %, '%': y}}]",
        "sessions: {fields: [%], headers: [%], redis: %}",
        "auth: {failures_per_minute: %}",
        "auth: {jwt: {issuer: %, audience: [%], jwks: %, claim: %, algorithms: [%]}}",
        "disaggregation: {protocol: %}",
        "passthrough: [%]",
        "admin: {host: %, port: %, token: %}",
    ]
    told = ""
    for place in places:
        for written in ("'${SECRET}'", "'a ${SECRET} b'"):
            try:
                parse(place.replace("'%'", "y2").replace("%", written), {"SECRET": value})
            except ConfigError as error:
                told += f"{error}\n"
    assert told.count("${SECRET}") > 25
    for part in (value, repr(value)[1:-1], repr(str(Secret(value)))[1:-1]):
        assert part not in told, [line for line in told.splitlines() if part in line]
