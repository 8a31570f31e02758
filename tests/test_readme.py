"""What README shows works."""

import json
import re
from pathlib import Path

from gateway.config import parse
from gateway.metrics import Metrics
from gateway.series import Histogram
from policies.base import Fleet, Request, Target

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_configuration_by_example_is_accepted():
    text, sources = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert [each.source for each in parse(sources).discovery] == ["kubernetes", "inference_pool", "dns", "file"]
    config = parse(
        text, {"ENGINE_KEY": "a", "RESEARCH_KEY": "b", "BATCH_KEY": "c", "ISOLATION_KEY": "d", "TOKEN_KEY": "e"}
    )
    assert config.make_policy(config.tenants[0].policy).name == "session"
    sources = [worker.spec().events for worker in config.workers if worker.events.enabled]
    assert [source and source.replay for source in sources] == [None, "tcp://10.0.0.3:5657", None]


def test_the_flags_of_engines_are_json_with_a_gap_between_the_ports():
    told = re.findall(r"--kv-events-config '(.*?)'", README)
    assert len(told) == 2
    for flags in map(json.loads, told):
        ports = [int(flags[name].removeprefix("tcp://*:")) for name in ("endpoint", "replay_endpoint")]
        assert ports[1] - ports[0] >= 64


def test_every_metric_and_file_that_is_named_exists():
    written = Metrics()
    metrics = [metric for metric in vars(written).values() if hasattr(metric, "name")]
    known = {metric.name if isinstance(metric, Histogram) else f"{metric.name}_total" for metric in metrics}
    gauges = "".join(
        (Path(__file__).parent.parent / f"gateway/{name}.py").read_text()
        for name in ("discovered", "gauges", "jwks", "reload", "replicas/joined")
    )
    for name in re.findall(r"`(warmroute_\w+)`", README):
        assert name in known or f'"{name}"' in gauges, name
    for path in re.findall(r"`((?:gateway|kv_index|deploy)/[\w/.]+)`", README):
        assert (Path(__file__).parent.parent / path).exists(), path


def test_the_policy_by_example_chooses():
    (text,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    space: dict[str, object] = {"__name__": "example"}
    exec(text, space)
    policy = space["Shortest"]()
    fleet = Fleet([Target(0, "a", wait=1.0), Target(1, "b", wait=0.5)])
    assert policy.choose(Request(), fleet, 0.0).target.name == "b"


def test_every_policy_of_the_table_exists():
    from policies.base import names

    assert table("| policy | chooses |") == set(names())


def test_every_protocol_of_the_table_exists():
    from gateway.disagg import all_protocols

    assert table("| protocol | engines | how |") == set(all_protocols())


def table(head: str) -> set[str]:
    """Names in the first column of the table under ``head``."""
    rows = README.split(head, 1)[1].split("\n\n", 1)[0]
    firsts = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", rows, re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`([a-z_]+)`", first)}
