"""The command ``warmroute``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import uvloop

from gateway import config as configuration, console
from gateway.config import Config, WorkerConfig
from gateway.config_check import check
from gateway.config_reader import ConfigError, Problem
from gateway.credentials import SALT, BadKey, hashed, new_key
from gateway.seat import seat
from gateway.source import Source
from kv_index.checkpoints import Rule

if TYPE_CHECKING:
    from load_tests.workloads.chains import Traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else list(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, datefmt="%H:%M:%S"
    )
    try:
        return int(options.run(options))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute", description="A gateway in front of a fleet of LLM engines.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the gateway")
    serve.add_argument("--config", metavar="FILE", help="YAML configuration; flags below win over it")
    serve.add_argument(
        "--worker", metavar="URL", action="append", default=[], help="an engine, like http://host:8000; may be repeated"
    )
    serve.add_argument("--policy", metavar="NAME", help="how targets are chosen (default cache_aware)")
    serve.add_argument("--host", help="address for clients (default 0.0.0.0)")
    serve.add_argument("--port", type=int, help="port for clients (default 8080)")
    serve.add_argument("--admin-port", type=int, help="port of the control plane on loopback (default 8081)")
    serve.add_argument(
        "--processes", type=_count, metavar="N", help="gateway processes that share the port (default 1, unsupervised)"
    )
    serve.set_defaults(run=_serve)
    demo = commands.add_parser("demo", help="compare policies on an embedded fleet of simulated engines")
    demo.add_argument(
        "--seconds", type=float, default=12.0, metavar="N", help="length of each policy's run (default 12)"
    )
    demo.add_argument("--keep", action="store_true", help="stay up afterwards, to be tried with curl")
    demo.add_argument("--json", action="store_true", help="print the results as JSON")
    demo.set_defaults(run=_demo)
    _add_replay(commands)
    check = commands.add_parser("check", help="check a configuration file, or a fleet")
    check.add_argument("file", metavar="FILE", nargs="?", help="YAML configuration")
    check.add_argument("--fleet", action="store_true", help="ask every worker what it is and what it lacks")
    check.add_argument("--worker", metavar="URL", action="append", default=[], help="a worker to ask; may be repeated")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=_check)
    _add_diff(commands)
    _add_doctor(commands)
    console.add(commands)
    key = commands.add_parser("key", help="make a tenant's key, or hash one")
    key.add_argument("--hash", action="store_true", help="hash the key on standard input, and make none")
    key.add_argument("--salt", metavar="HEX", help="that of other keys: each distinct salt costs unknown keys time")
    key.set_defaults(run=_key)
    return parser


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="tell what another configuration would change",
        description="Exit status: 0 for no change, 1 for some, 2 if they could not be compared.",
    )
    diff.add_argument("files", metavar="FILE", nargs="+", help="OLD and NEW; with --admin only NEW")
    diff.add_argument("--admin", metavar="URL", help="compare with what the gateway of that admin port has in force")
    diff.add_argument("--token-env", metavar="NAME", help="the environment variable that has its admin token")
    diff.add_argument("--json", action="store_true", help="print the changes as JSON")
    diff.set_defaults(run=_diff)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="find where prompts break from those before them, and why")
    doctor.add_argument(
        "file",
        metavar="FILE",
        help="requests, one a line, gzipped or not (-: standard input): bodies, or objects of a body and its path, headers, "
        "tenant, time and session",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--examples", action="store_true", help="show some characters of the prompts around each break")
    doctor.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    doctor.add_argument(
        "--tokenizer", metavar="FILE", help="the model's tokenizer.json, to count tokens and not estimate"
    )
    doctor.add_argument("--template", metavar="FILE", help="the model's chat template, for chat completions")
    doctor.set_defaults(run=_doctor)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser("replay", help="compare policies on a simulated fleet, in virtual time")
    replay.add_argument(
        "trace",
        metavar="TRACE",
        help="a trace, gzipped or not (a gateway's recording, Mooncake's form, recorded sessions, logs of agents or OpenAI "
        "requests, OpenTelemetry spans; looked for here and in $WARMROUTE_TRACES), or a generator: agents, causal, chat, "
        "documents, hot, hot_some, load, rollouts, subagents, tools, tree, universal; with factors behind it, like "
        "agents?tokens=0.5&think=0.1&rate=2",
    )
    replay.add_argument("--workers", type=_count, metavar="N", help="simulated engines (default 8)")
    replay.add_argument("--pd", type=_pair, metavar="P:D", help="P engines that only prefill, D that only decode")
    replay.add_argument(
        "--policy",
        metavar="A,B",
        default="round_robin,least_load,cache_aware",
        help="policies to compare (default round_robin,least_load,cache_aware); other routers' rules are there too, "
        "under names that an unknown one lists",
    )
    _add_engine(replay.add_argument_group("engines"))
    _add_view(replay.add_argument_group("what the gateway sees"))
    replay.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    replay.add_argument("--seed", type=int, default=0, metavar="S", help="what is random follows from it (default 0)")
    replay.add_argument("--seeds", type=_count, default=1, metavar="K", help="mean and deviation of K seeds, S and on")
    replay.add_argument(
        "--slo", type=_goal, metavar="TTFT[:TPOT]", help="ms within which a first token, and each further one, is good"
    )
    replay.add_argument(
        "--gpu-hour", type=_above, metavar="PRICE", help="price of an accelerator's hour (a large engine has eight)"
    )
    replay.add_argument("--json", action="store_true", help="print the results as JSON")
    replay.add_argument("--html", metavar="FILE", help="write a page with plots, which needs nothing else")
    replay.set_defaults(run=_replay)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine",
        choices=("medium", "large"),
        default="medium",
        help="how fast: a mid-size model on one accelerator, or 70 billion parameters on eight (default medium)",
    )
    group.add_argument(
        "--kv-tokens", type=_count, default=500_000, metavar="N", help="KV cache of each engine (default 500000)"
    )
    group.add_argument("--host-tokens", type=_count, default=0, metavar="N", help="host memory below it (default none)")
    group.add_argument(
        "--reuse", type=_rule, metavar="RULE", help="hybrid model: resumes at ends, boundary or every:N (default any)"
    )
    group.add_argument("--held", action="store_true", help="keep a session's KV between its turns (streaming sessions)")


def _add_view(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--events", action="store_true", help="engines tell by events what they hold")
    group.add_argument("--event-lag", type=_least, metavar="SECONDS", help="events are that late (default 0.01)")
    group.add_argument("--silent", type=_count, metavar="N", help="engines that publish no events (default none)")
    group.add_argument(
        "--poll", type=_above, default=1.0, metavar="SECONDS", help="between two load reports (default 1)"
    )
    group.add_argument("--gateways", type=_count, default=1, metavar="N", help="that share the fleet (default 1)")
    group.add_argument("--no-session", action="store_true", help="requests do not tell their session")


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not all(part.isascii() and part.isdigit() and int(part) for part in (first, second)):
        raise argparse.ArgumentTypeError(f"P:D is needed, whole numbers of at least 1, like 2:6, not {text!r}")
    return int(first), int(second)


def _goal(text: str) -> tuple[float, float | None]:
    first, colon, second = text.partition(":")
    try:
        return _above(first), _above(second) if colon else None
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"milliseconds above 0 are needed, TTFT or TTFT:TPOT, like 500:40, not {text!r}"
        ) from None


def _rule(text: str) -> Rule | None:
    try:
        return None if text == "any" else Rule.of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"any, ends, boundary or every:N is needed, not {text!r}") from None


def _least(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, not {text!r}")
    return value


def _above(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return value


def _flags(options: argparse.Namespace, config: Config) -> None:
    """What flags say wins over ``config``, whenever it is read."""
    for url in options.worker:
        config.workers.append(WorkerConfig(url))
    if options.policy is not None:
        config.policy = options.policy
    if options.host is not None:
        config.listen.host = options.host
    if options.port is not None:
        config.listen.port = options.port
    if options.admin_port is not None:
        config.admin.port = options.admin_port
    if options.processes is not None:
        config.replicas.processes = options.processes


def _config(options: argparse.Namespace) -> tuple[Config, Source | None]:
    """The configuration of a file and flags together, and where it came from. Raises `ConfigError`."""
    if options.config:
        source = Source(options.config, partial(_flags, options))
        return source.load(), source
    config = Config()
    _flags(options, config)
    problems = check(config)
    if problems:
        raise ConfigError(problems)
    return config, None


def _serve(options: argparse.Namespace) -> int:
    config, source = _config(options)
    environment = configuration.environment()
    place = seat(environment)
    if place is None and (options.processes is not None or config.replicas.processes > 1):
        return _supervise(config, options.given, environment)
    from gateway.run import serve

    if place is not None:
        logging.getLogger().handlers[0].setFormatter(
            logging.Formatter(f"%(asctime)s [{place.number}] %(levelname)s %(message)s", "%H:%M:%S")
        )
    if not config.workers and not config.discovery and (place is None or not place.number):
        logging.getLogger("warmroute").warning(
            "no workers: name some with --worker URL, in the file, or POST them to /workers on the admin port"
        )
    try:
        uvloop.run(serve(config, source, place))
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return 1
    return 0


def _supervise(config: Config, given: Sequence[str], environment: Mapping[str, str]) -> int:
    from gateway.supervisor import supervise

    try:
        return supervise(config, given, environment)
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        return 1


def _demo(options: argparse.Namespace) -> int:
    from load_tests.demo import run

    return run(seconds=options.seconds, keep=options.keep, as_json=options.json)


def _replay(options: argparse.Namespace) -> int:
    from load_tests.simulate.command import Report, fleet, replay
    from load_tests.simulate.figures import Goal
    from load_tests.workloads.catalogue import find

    try:
        simulated = fleet(
            workers=options.workers,
            pd=options.pd,
            engine=options.engine,
            kv_tokens=options.kv_tokens,
            host_tokens=options.host_tokens,
            reuse=options.reuse,
            events=options.events,
            event_lag=options.event_lag,
            silent=options.silent,
            poll=options.poll,
            gateways=options.gateways,
            held=options.held,
            no_session=options.no_session,
        )
        report = Report(
            seeds=range(options.seed, options.seed + options.seeds),
            goal=None if options.slo is None else Goal(*options.slo),
            price=options.gpu_hour,
            as_json=options.json,
            html=options.html,
        )

        def read(seed: int) -> Traffic:
            return find(options.trace, workers=simulated.workers, seed=seed, limit=options.limit)

        return replay(read, options.policy, simulated, report)
    except ValueError as error:
        print(f"warmroute replay: {error}", file=sys.stderr)
        return 2


def _doctor(options: argparse.Namespace) -> int:
    from gateway.doctor_command import run

    try:
        return run(
            options.file,
            as_json=options.json,
            examples=options.examples,
            limit=options.limit,
            tokenizer=options.tokenizer,
            template=options.template,
        )
    except ValueError as error:
        print(f"warmroute doctor: {error}", file=sys.stderr)
        return 2


def _diff(options: argparse.Namespace) -> int:
    from gateway.diff_command import run

    *before, after = options.files
    if len(before) != (0 if options.admin else 1):
        raise ConfigError([Problem(None, "", "name two files, OLD and NEW, or one file and --admin URL")])
    token = None
    if options.token_env is not None:
        token = configuration.variable(options.token_env)
    return run(before[0] if before else None, after, options.admin, token, options.json)


def _key(options: argparse.Namespace) -> int:
    key = sys.stdin.read().strip() if options.hash else new_key()
    try:
        salt = None if options.salt is None else bytes.fromhex(options.salt)
        if salt is not None and not 0 < len(salt) <= SALT:
            raise ValueError
    except ValueError:
        raise ConfigError([Problem(None, "--salt", f"up to {2 * SALT} hex digits are needed")]) from None
    try:
        line = hashed(key, salt)
    except BadKey as error:
        raise ConfigError([Problem(None, "key", str(error))]) from None
    if not options.hash:
        print(f"{key}\n\nIt is shown this once: give it to its tenant. In the configuration, or a file of keys:\n")
    print(line)
    return 0


def _check(options: argparse.Namespace) -> int:
    from gateway.check import check_fleet

    if options.file is None and not options.worker:
        raise ConfigError([Problem(None, "", "name a FILE, or --worker URL with --fleet")])
    config = configuration.read(options.file) if options.file else Config()
    for url in options.worker:
        config.workers.append(WorkerConfig(url))
    if options.fleet or options.worker:
        return asyncio.run(check_fleet(config, as_json=options.json))
    print(f"{options.file}: fine")
    return 0
