"""The configuration file: everything is read or refused, and told where and how to cure it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ConfigError, Problem, Secret, check, parse, read, shown

ENV = {"TOKEN": "s3cret-token", "KEY": "s3cret-key", "OTHER": "s3cret-other", "PORT": "9999", "SPILL": "1.5"}

FULL = """
listen: {host: 127.0.0.1, port: 8088, tls: {cert: /etc/tls/crt, key: /etc/tls/key}, max_body: 32M, max_connections: 2k,
         idle: 2m, head_timeout: 10s, body_timeout: 500ms}
admin: {host: 0.0.0.0, port: 8089, token: "${TOKEN}"}
metrics: {host: 0.0.0.0, port: 9464}
policy: careful
models:
  qwen3.5-27b: {aliases: [default, qwen], policy: cache_aware, thinking: strip_before_last_user}
workers:
  - {url: "http://10.0.0.1:8000"}
  - {url: "https://10.0.0.3:30000/base", engine: sglang, role: unified, models: [a, b], api_key: "${KEY}", kv_tokens: 2M,
     verify_tls: false, ca: /etc/ca}
policies:
  careful: {name: session, fallback: eager, spill: 1.5}
  eager: {name: cache_aware, margin: 0.25}
tenants:
  - {name: research, keys: ["${OTHER}"], policy: careful, models: [default], isolation: isolated, show_routing: false}
anonymous: true
sessions: {idle: 1h, max: 200k, headers: [x-my-session]}
index: {max_bytes: 1G}
retries: {attempts: 4, budget: 0.2}
timeouts: {connect: 1s, first_byte: 15m, idle: 90s}
probes: {health: 2.5s, load: 1, join: 250ms}
passthrough: [/v1/audio/speech, /custom]
drain: 7s
drain_limit: 1m
"""


def problems(text: str, environment: dict[str, str] | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as found:
        parse(text, ENV if environment is None else environment, "w.yaml")
    for problem in found.value.problems:
        assert str(problem) in str(found.value)
    assert all(line.startswith("w.yaml: ") for line in str(found.value).splitlines())
    return found.value.problems


def only(text: str, environment: dict[str, str] | None = None) -> Problem:
    (found,) = problems(text, environment)
    return found


def test_every_key_is_read() -> None:
    config = parse(FULL, ENV)
    assert config.listen.port == 8088
    assert config.listen.tls is not None
    assert (config.listen.tls.cert, config.listen.tls.key) == ("/etc/tls/crt", "/etc/tls/key")
    assert (config.listen.max_body, config.listen.max_connections) == (32 * 1024**2, 2000)
    assert (config.listen.idle, config.listen.head_timeout, config.listen.body_timeout) == (120.0, 10.0, 0.5)
    assert (config.admin.host, config.admin.port, config.admin.token) == ("0.0.0.0", 8089, "s3cret-token")
    assert config.metrics is not None
    assert (config.metrics.host, config.metrics.port) == ("0.0.0.0", 9464)
    model = config.models["qwen3.5-27b"]
    assert (model.aliases, model.policy, model.thinking) == (
        ["default", "qwen"],
        "cache_aware",
        "strip_before_last_user",
    )
    first, second = config.workers
    assert (first.url, first.engine, first.verify_tls) == ("http://10.0.0.1:8000", None, True)
    assert (second.engine, second.role, second.models, second.api_key) == (
        "sglang",
        "unified",
        ["a", "b"],
        "s3cret-key",
    )
    assert (second.kv_tokens, second.verify_tls, second.ca) == (2_000_000, False, "/etc/ca")
    (tenant,) = config.tenants
    assert (tenant.name, tenant.keys, tenant.policy, tenant.models) == (
        "research",
        ["s3cret-other"],
        "careful",
        ["default"],
    )
    assert (tenant.isolation, tenant.show_routing, config.anonymous) == ("isolated", False, True)
    assert (config.sessions.idle, config.sessions.max, config.sessions.headers) == (3600.0, 200_000, ["x-my-session"])
    assert config.index.max_bytes == 1024**3
    assert (config.retries.attempts, config.retries.budget) == (4, 0.2)
    assert (config.timeouts.connect, config.timeouts.first_byte, config.timeouts.idle) == (1.0, 900.0, 90.0)
    assert (config.probes.health, config.probes.load, config.probes.join) == (2.5, 1.0, 0.25)
    assert config.passthrough == ["/v1/audio/speech", "/custom"]
    assert (config.drain, config.drain_limit) == (7.0, 60.0)
    policy: Any = config.make_policy(config.policy)
    assert (policy.name, policy.spill, policy.fallback.name, policy.fallback.margin) == (
        "session",
        1.5,
        "cache_aware",
        0.25,
    )


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n", "{}"])
def test_an_empty_file_is_all_defaults(text: str) -> None:
    assert parse(text, {}) == Config()
    assert check(Config()) == []


@pytest.mark.parametrize(
    ("text", "line", "key", "near"),
    [
        ("policy: random\nlisten:\n  prot: 80\n", 3, "listen.prot", "port"),
        ("polcy: random", 1, "polcy", "policy"),
        ("workers:\n  - url: http://a:1\n    engin: vllm\n", 3, "workers[0].engin", "engine"),
        ("tenants: [{name: a, keys: [k], isolatoin: shared}]", 1, "tenants[0].isolatoin", "isolation"),
        ("models:\n  m:\n    alias: [x]\n", 3, "models.m.alias", "aliases"),
        ("admin:\n  tokn: x\n", 2, "admin.tokn", "token"),
        ("listen: {tls: {cert: a, key: b, keey: c}}", 1, "listen.tls.keey", "key"),
    ],
)
def test_an_unknown_key_is_told_with_its_line_and_the_nearest_known_one(
    text: str, line: int, key: str, near: str
) -> None:
    found = only(text)
    assert (found.line, found.key) == (line, key)
    assert f"did you mean {near!r}?" in found.message


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    found = only("probes: {zzz: 1}")
    assert "known here: health, load, join" in found.message


def test_pairs_are_read() -> None:
    config = parse(
        """
disaggregation: {protocol: nixl, lease: 20s, bidirectional: true, keep: 5m}
models: {m: {tokenizer: engine}}
workers:
  - {url: "http://a:1", role: prefill, bootstrap: "10.0.0.1:8998"}
  - {url: "http://b:1", role: decode, protocol: mooncake, pool: blue, kv_source: "10.0.0.2:5710", shared_store: true}
"""
    )
    told = config.disaggregation
    assert (told.named, told.lease, told.bidirectional, told.keep) == ("nixl", 20.0, True, 300.0)
    first, second = (worker.spec(told.named) for worker in config.workers)
    assert (first.role, first.protocol, first.bootstrap) == ("prefill", "nixl", ("10.0.0.1", 8998))
    assert (second.protocol, second.pool, second.source, second.stores) == (
        "mooncake",
        "blue",
        ("10.0.0.2", 5710),
        True,
    )
    assert parse("disaggregation: {protocol: auto}").disaggregation.named is None


@pytest.mark.parametrize(
    ("text", "key", "cure"),
    [
        ('workers: [{url: "http://a:1", role: both}]', "workers[0].role", "prefill"),
        ('workers: [{url: "http://a:1", protocol: ucx}]', "workers[0].protocol", "nixl"),
        ('workers: [{url: "http://a:1", bootstrap: "a"}]', "workers[0].bootstrap", "host and port"),
        ('workers: [{url: "http://a:1", kv_source: "http://a:1"}]', "workers[0].kv_source", "host and port"),
        ("disaggregation: {protocol: fast}", "disaggregation.protocol", "sglang"),
        ("disaggregation: {bidirectional: true}", "disaggregation.bidirectional", "tokenizer"),
        ("disaggregation: {lease: 0s}", "disaggregation.lease", "more than 0"),
        ("disaggregation: {keep: 0}", "disaggregation.keep", "more than 0"),
    ],
)
def test_what_is_wrong_with_pairs_is_told_with_the_cure(text: str, key: str, cure: str) -> None:
    found = only(text)
    assert found.key == key
    assert cure in found.message


@pytest.mark.parametrize(
    "text",
    [
        "models: {m: {tokenizer: /t.json}}",
        "models: {m: {template: /t.jinja}}",
        "discovery: {source: kubernetes}",
    ],
)
def test_what_is_not_done_is_refused_and_not_silently_accepted(text: str) -> None:
    # Whoever builds one of these takes it out here and tests that it is read.
    assert problems(text)[0].line == 1


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        """
listen: {port: many, max_body: huge}
polcy: x
workers:
  - {engine: vllm}
  - {url: "http://a:1", kv_tokens: -3}
timeouts: {connect: soon}
sessions: {max: [1]}
anonymous: perhaps
"""
    )
    assert [(each.line, each.key) for each in found if each.key != "sessions.max"] == [
        (2, "listen.port"),
        (2, "listen.max_body"),
        (3, "polcy"),
        (5, "workers[0]"),
        (6, "workers[1].kv_tokens"),
        (7, "timeouts.connect"),
        (9, "anonymous"),
    ]
    assert any(each.key == "sessions.max" and each.line == 8 for each in found)


def test_all_problems_of_meaning_are_told_at_once_too() -> None:
    found = problems(
        """
policy: nonsense
listen: {port: 70000}
workers:
  - {url: "ftp://a", engine: nonsense, role: nonsense}
tenants:
  - {name: a}
"""
    )
    assert {each.key for each in found} == {
        "policy",
        "listen.port",
        "workers[0].url",
        "workers[0].engine",
        "workers[0].role",
        "tenants[0].keys",
    }
    assert all(each.line is not None for each in found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h", 3600), ("1.5h", 5400), ("12", 12), ("0.5", 0.5), ('"7 s"', 7)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse(f"timeouts: {{connect: {text}}}", {}).timeouts.connect == seconds


@pytest.mark.parametrize(
    "text", ["5d", "-1s", "1e3", "soon", "''", "5 minutes", "[1]", "{a: 1}", "ms", "null", "'1,5s'", "٣s"]
)
def test_what_is_no_duration(text: str) -> None:
    found = problems(f"timeouts: {{connect: {text}}}")
    assert {each.key for each in found} == {"timeouts.connect"}


@pytest.mark.parametrize(
    ("text", "size"), [("64k", 65536), ("64M", 64 * 1024**2), ("1G", 1024**3), ("4096", 4096), ("1.5k", 1536)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse(f"listen: {{max_body: {text}}}", {}).listen.max_body == size


def test_counts_are_decimal() -> None:
    assert parse("sessions: {max: 200k}", {}).sessions.max == 200_000
    assert parse("sessions: {max: 2M}", {}).sessions.max == 2_000_000


@pytest.mark.parametrize("text", ["64kb", "64K", "-1", "lots", "1e6", "0x10", "true", "null"])
def test_what_is_no_size(text: str) -> None:
    assert only(f"listen: {{max_body: {text}}}").key == "listen.max_body"


def test_homes_are_kept_in_one_place() -> None:
    found = only("sessions: {state: /tmp/a, redis: 'redis://:secret@localhost:6379/0'}")
    assert found.key == "sessions.redis" and "sessions.state" in found.message
    assert only("sessions: {redis: 'amqp://:secret@localhost'}").message.count("secret") == 0
    for url in ("redis://h", "redis://:p@h:6379/1", "rediss://u:p@h:6380", "unix:///run/redis.sock"):
        parse(f"sessions: {{redis: '{url}'}}", {})


@pytest.mark.parametrize(
    "text",
    [
        "listen: {max_body: 0}",
        "listen: {max_connections: 0}",
        "listen: {idle: 0}",
        "sessions: {max: 0}",
        "sessions: {idle: 0s}",
        "warming: {seconds: 0}",
        'sessions: {redis: "localhost:6379"}',
        'sessions: {redis: "http://localhost:6379"}',
        'sessions: {redis: "redis://"}',
        'sessions: {redis: "redis://localhost:port/0"}',
        "index: {max_bytes: 0}",
        "probes: {health: 0}",
        "probes: {load: 0ms}",
        "probes: {join: 0}",
        "timeouts: {connect: 0}",
        "timeouts: {first_byte: 0}",
        'workers: [{url: "http://a:1", kv_tokens: 0}]',
        "retries: {attempts: 0}",
        "retries: {attempts: 11}",
        "retries: {budget: 1.5}",
        "retries: {budget: nan}",
        "retries: {budget: -0.1}",
        "listen: {port: 65536}",
        "listen: {port: -1}",
        "admin: {port: 65536}",
        "metrics: {port: 65536}",
        "listen: {port: 8080.5}",
    ],
)
def test_numbers_that_could_not_work_are_refused(text: str) -> None:
    found = only(text)
    assert found.line == 1
    assert found.key.split(".")[-1] in text


def test_variables_are_filled_in_anywhere() -> None:
    config = parse(
        """
listen: {port: "${PORT}"}
workers: [{url: "http://${HOST}:${PORT}/x"}]
policies:
  free:
    name: session
    spill: ${SPILL}
""",
        {**ENV, "HOST": "10.0.0.9"},
    )
    assert config.listen.port == 9999
    assert config.workers[0].url == "http://10.0.0.9:9999/x"
    assert config.policies["free"]["spill"] == 1.5


def test_a_variable_that_is_not_set_is_told_by_name() -> None:
    found = only('admin:\n  token: "${NOWHERE}"\n')
    assert (found.line, found.key) == (2, "admin.token")
    assert "NOWHERE" in found.message


@pytest.mark.parametrize("value", ["{a: b", "=", "!!python/object:os.system", "[", "a: b: c", "*x"])
def test_a_variable_may_hold_anything(value: str) -> None:
    for text in (
        "policies: {p: {name: session, fallback: ${V}}}",
        'admin: {token: "${V}"}',
        "passthrough: [/a, '${V}']",
    ):
        try:
            parse(text, {"V": value})
        except ConfigError:
            pass


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("policy: random\npolicy: random\n", 2, "policy"),
        ("listen:\n  port: 1\n  port: 2\n", 3, "listen.port"),
        ("models:\n  a: {}\n  a: {}\n", 3, "models.a"),
        ("policies:\n  a: {name: session, spill: 2, spill: 3}\n", 2, "policies.a.spill"),
    ],
)
def test_a_key_that_appears_twice_is_refused(text: str, line: int, key: str) -> None:
    found = only(text)
    assert (found.line, found.key) == (line, key)
    assert "twice" in found.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("- a\n- b\n", ""),
        ("just words", ""),
        ("listen: 8080", "listen"),
        ("listen: [1]", "listen"),
        ("workers: http://a:1", "workers"),
        ("workers: {url: x}", "workers"),
        ("workers: [http://a:1]", "workers[0]"),
        ("models: [a]", "models"),
        ("models: {a: b}", "models.a"),
        ("policies: [a]", "policies"),
        ("policies: {a: b}", "policies.a"),
        ("tenants: {a: b}", "tenants"),
        ("tenants: [{name: a, keys: k}]", "tenants[0].keys"),
        ("tenants: [{name: a, keys: [[k]]}]", "tenants[0].keys[0]"),
        ("policy: [a]", "policy"),
        ("policy: null", "policy"),
        ("policy:", "policy"),
        ("anonymous: 3", "anonymous"),
        ("anonymous: [true]", "anonymous"),
        ("passthrough: /a", "passthrough"),
        ("sessions: {headers: x}", "sessions.headers"),
        ("retries: {attempts: three}", "retries.attempts"),
        ("retries: {attempts: }", "retries.attempts"),
        ("metrics: 9464", "metrics"),
        ("listen: {tls: true}", "listen.tls"),
        ("listen: {tls: {cert: a}}", "listen.tls"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_by_its_key(text: str, key: str) -> None:
    found = problems(text)
    assert found[0].key == key
    assert found[0].line == 1


@pytest.mark.parametrize("text", ["a: [", "\ta: 1", "a: 'b", "a: b: c", "%", "a: 1\n---\nb: 1\n", "a: *x", "a: \x01"])
def test_what_is_not_yaml_is_told_as_such(text: str) -> None:
    assert "YAML" in only(text).message


def test_an_alias_that_contains_itself_is_refused() -> None:
    assert problems("policies: &p\n  a: *p\n")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError) as found:
            read(str(path))
        assert str(path) in str(found.value)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError):
        read(str(binary))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", "127.0.0.1.example", ""])
def test_an_admin_port_beyond_loopback_needs_a_token(host: str) -> None:
    found = only(f'admin: {{host: "{host}"}}')
    assert found.key == "admin.host"
    assert found.line == 1
    assert "token" in found.message
    assert parse(f'admin: {{host: "{host}", token: x}}', {}).admin.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_an_admin_port_on_loopback_needs_none(host: str) -> None:
    assert parse(f'admin: {{host: "{host}"}}', {}).admin.token is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('admin: {token: "${V}"}', "admin.token"),
        ('workers: [{url: "http://a:1", api_key: "${V}"}]', "workers[0].api_key"),
        ('tenants: [{name: a, keys: [k, "${V}"]}]', "tenants[0].keys"),
    ],
)
@pytest.mark.parametrize("value", ["", "abc\n", "abc\r\nx-evil: 1", " abc", "a\x00"])
def test_a_secret_that_is_empty_or_unclean_is_refused_without_being_shown(text: str, key: str, value: str) -> None:
    found = only(text, {"V": value})
    assert found.key == key
    assert found.line == 1
    assert "abc" not in str(found)


SECRETS = ("s3cret-token", "s3cret-key", "s3cret-other")


def test_secrets_are_never_shown() -> None:
    config = parse(FULL, ENV)
    for text in (repr(config), str(config), json.dumps(shown(config)), f"{config.workers} {config.tenants!r}"):
        for secret in SECRETS:
            assert secret not in text
    assert shown(config)["admin"]["token"] == "***"
    assert shown(config)["workers"][1]["api_key"] == "***"
    assert shown(config)["tenants"][0]["keys"] == ["***"]
    assert repr(Secret("abc")) == "'***'"


@pytest.mark.parametrize(
    "text",
    [
        'tenants: [{name: a, keys: ["${KEY}", "${KEY}"]}]',
        'tenants: [{name: a, keys: ["${KEY}"]}, {name: b, keys: ["${KEY}"]}]',
        'workers: [{url: "http://user:${KEY}@a:1"}]',
        'workers: [{url: "http://${KEY}@a:1"}]',
        'admin: {token: "${KEY}", prot: 1}',
        'workers: [{url: "ftp://a", api_key: "${KEY}"}]',
    ],
)
def test_no_message_holds_a_secret(text: str) -> None:
    for found in problems(text):
        assert "s3cret" not in str(found)


@pytest.mark.parametrize(
    ("text", "key", "line", "words"),
    [
        ("policy: cache_awre", "policy", 1, "cache_aware"),
        ("policy: zzzz", "policy", 1, "round_robin"),
        ("models:\n  m:\n    policy: zzzz\n", "models.m.policy", 3, "round_robin"),
        ("tenants:\n  - name: a\n    keys: [k]\n    policy: sessoin\n", "tenants[0].policy", 4, "session"),
        ("policies:\n  p:\n    name: sessoin\n", "policies.p.name", 3, "session"),
        ("policies:\n  p:\n    spill: 2\n", "policies.p", 2, "name"),
        ("policies:\n  p:\n    name: 5\n", "policies.p.name", 3, "round_robin"),
        ("policy: p\npolicies:\n  p:\n    name: session\n    spil: 2\n", "policies.p.spil", 5, "spill"),
        ("policies:\n  p:\n    name: session\n    spill: much\n", "policies.p.spill", 4, "number"),
        ("policies:\n  p:\n    name: session\n    fallback: zzzz\n", "policies.p.fallback", 4, "zzzz"),
        ("policies:\n  p:\n    name: session\n    fallback: 3\n", "policies.p.fallback", 4, "fallback"),
        ("policies:\n  p:\n    name: session\n    fallback: p\n", "policies.p.fallback", 4, "another"),
        (
            "policies:\n  p:\n    name: session\n    fallback: {name: cache_aware, margin: -1}\n",
            "policies.p.fallback.margin",
            4,
            "number",
        ),
    ],
)
def test_a_bad_policy_or_option_is_told_by_its_key(text: str, key: str, line: int, words: str) -> None:
    found = only(text)
    assert (found.key, found.line) == (key, line)
    assert words in found.message


def test_a_policy_may_be_named_like_the_set_that_tunes_it() -> None:
    config = parse("policy: cache_aware\npolicies: {cache_aware: {name: cache_aware, margin: 3}}", {})
    policy: Any = config.make_policy("cache_aware")
    assert policy.margin == 3


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('workers: [{url: ""}]', "workers[0].url"),
        ("workers: [{url: 10.0.0.1:8000}]", "workers[0].url"),
        ('workers: [{url: "http://"}]', "workers[0].url"),
        ('workers: [{url: "http://a:99999"}]', "workers[0].url"),
        ('workers: [{url: "http://a:b"}]', "workers[0].url"),
        ('workers: [{url: "http://[::1"}]', "workers[0].url"),
        ('workers: [{url: "http://a:1?x=1"}]', "workers[0].url"),
        ('workers: [{url: "http://a:1#x"}]', "workers[0].url"),
        ('workers: [{url: "http://a b:1"}]', "workers[0].url"),
        ('workers: [{url: "http://a:1\\n"}]', "workers[0].url"),
        ('workers: [{url: "http://a:1"}, {url: "http://a:1/"}]', "workers[1].url"),
        ('workers: [{url: "http://a:1", engine: vlm}]', "workers[0].engine"),
        ("tenants: [{name: a, keys: [k]}, {name: a, keys: [j]}]", "tenants[1].name"),
        ('tenants: [{name: "", keys: [k]}]', "tenants[0].name"),
        ("tenants: [{name: a, keys: []}]", "tenants[0].keys"),
        ("tenants: [{name: a, keys: [k], isolation: strict}]", "tenants[0].isolation"),
        ("models: {a: {aliases: [b]}, b: {}}", "models.a.aliases"),
        ("models: {a: {aliases: [x]}, b: {aliases: [x]}}", "models.b.aliases"),
        ("models: {a: {thinking: maybe}}", "models.a.thinking"),
        ("passthrough: [v1/x]", "passthrough"),
        ("sessions: {headers: [Authorization]}", "sessions.headers"),
        ("sessions: {headers: [X_Request_Id]}", "sessions.headers"),
    ],
)
def test_what_makes_no_sense_is_told(text: str, key: str) -> None:
    found = only(text)
    assert (found.key, found.line) == (key, 1)


# -- the command --------------------------------------------------------------------------------------------------------


async def warmroute(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from gateway.cli import main; sys.exit(main())",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[2],
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "cache_awre"], ["policy", "cache_aware"]),
        (["--worker", "10.0.0.1:8000"], ["workers[0].url", "http://host:port"]),
        (["--worker", "http://a:99999"], ["workers[0].url", "port"]),
        (["--port", "70000"], ["listen.port", "70000"]),
        (["--port", "many"], ["--port", "many"]),
        (["--admin-port", "-1"], ["admin.port"]),
        (["--config", "/nowhere/w.yaml"], ["/nowhere/w.yaml"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
async def test_serve_ends_with_2_and_a_message_for_bad_flags(arguments: list[str], words: list[str]) -> None:
    status, out, err = await warmroute("serve", *arguments)
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err


async def test_serve_ends_with_2_and_every_problem_of_a_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text('listen: {prot: 1}\nadmin: {token: "${TOKEN}"}\nsessions: {max: lots}\n')
    status, _, err = await warmroute("serve", "--config", str(file), TOKEN="s3cret-token")
    assert status == 2
    assert f"{file}: line 1: listen.prot" in err
    assert f"{file}: line 3: sessions.max" in err
    assert "s3cret" not in err
    assert "Traceback" not in err


async def test_check_says_whether_a_file_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(FULL)
    status, out, _ = await warmroute("check", str(file), **ENV)
    assert (status, out) == (0, f"{file}: fine\n")
    file.write_text("policy: nonsense\n")
    status, _, err = await warmroute("check", str(file))
    assert status == 2
    assert "line 1: policy" in err


@pytest.mark.parametrize("arguments", [[], ["--worker", "nonsense"], ["--worker", "http://a:99999", "--fleet"]])
async def test_check_refuses_what_it_cannot_check(arguments: list[str]) -> None:
    status, _, err = await warmroute("check", *arguments)
    assert status == 2
    assert "Traceback" not in err


async def test_flags_win_over_the_file(tmp_path: Path) -> None:
    from gateway.cli import _config, _parser

    file = tmp_path / "w.yaml"
    file.write_text(
        'policy: random\nlisten: {host: 10.0.0.9, port: 1}\nadmin: {port: 2}\nworkers: [{url: "http://a:1"}]\n'
    )
    flags = ["--policy", "session", "--host", "127.0.0.1", "--port", "0", "--admin-port", "3"]
    more = ["--worker", "http://b:1", "--worker", "http://c:1"]
    config, _ = _config(_parser().parse_args(["serve", "--config", str(file), *flags, *more]))
    assert (config.policy, config.listen.host, config.listen.port, config.admin.port) == ("session", "127.0.0.1", 0, 3)
    assert [worker.url for worker in config.workers] == ["http://a:1", "http://b:1", "http://c:1"]
    config, _ = _config(_parser().parse_args(["serve", "--config", str(file)]))
    assert (config.policy, config.listen.host, config.listen.port, config.admin.port) == ("random", "10.0.0.9", 1, 2)
