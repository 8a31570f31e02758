"""What README shows works."""

import re
from pathlib import Path

from gateway.config import parse
from policies.base import Fleet, Request, Target

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_configuration_by_example_is_accepted():
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = parse(text, {"ENGINE_KEY": "a", "RESEARCH_KEY": "b", "BATCH_KEY": "c", "ISOLATION_KEY": "d"})
    assert config.make_policy(config.tenants[0].policy).name == "session"


def test_the_policy_by_example_chooses():
    (text,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    space: dict[str, object] = {"__name__": "example"}
    exec(text, space)
    policy = space["Shortest"]()
    fleet = Fleet([Target(0, "a", wait=1.0), Target(1, "b", wait=0.5)])
    assert policy.choose(Request(), fleet, 0.0).target.name == "b"


def test_every_policy_of_the_table_exists():
    from policies.base import names

    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", README, re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} - {"kv_index", "policies", "gateway"}
    assert shown == set(names())
