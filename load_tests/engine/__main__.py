"""``python -m load_tests.engine --port P --dialect vllm ...``: one simulated engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import uvloop

from load_tests.engine import Engine, EngineOptions
from load_tests.engine.options import (
    CONNECTORS,
    DIALECTS,
    EVENT_FORMATS,
    EVENT_HASHES,
    EVICTIONS,
    LATE_READS,
    LOAD_FAILURES,
    OFFLOAD_EVENTS,
    ROLES,
    OptionError,
)
from load_tests.engine.physics import Rates


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m load_tests.engine", description="One simulated LLM engine over HTTP."
    )
    add = arguments.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--dialect", choices=DIALECTS, default="vllm")
    add("--role", choices=ROLES, default="unified")
    add("--model", action="append", metavar="NAME", help="served model; may be given several times")
    add("--lora", action="append", default=[], metavar="NAME", help="adapter of the first model; likewise")
    add("--kv-tokens", type=int, default=131_072, metavar="N", help="room for KV")
    add("--block-size", type=int, default=0, metavar="N", help="KV block or page; 0 is the dialect's own")
    add("--max-running", type=int, default=64, metavar="N", help="sequences in a batch, or slots")
    add("--chunk-tokens", type=int, default=2048, metavar="N", help="tokens of one step")
    add("--max-queued", type=int, default=None, metavar="N", help="waiting requests; absent: unbounded")
    add("--context-length", type=int, default=0, metavar="N", help="0: the smaller of 32768 and the KV")
    add("--api-key", default=None)
    add("--time-scale", type=float, default=1.0, metavar="X", help="0.1 is ten times faster, 0 does not wait")
    add("--keep-alive", type=float, default=5.0, metavar="S", help="seconds for which an idle connection is kept")
    add("--no-usage-details", action="store_true", help="usage without cached tokens")
    add("--no-prefix-cache", action="store_true")
    add("--no-metrics", action="store_true")
    add("--seed", type=int, default=0, help="engines with one seed answer a prompt alike")
    add("--hybrid", default="", metavar="RULE", help="recurrent layers; states kept at boundary, ends or every:N")
    add("--hybrid-states", type=int, default=256, metavar="N", help="states kept at most")
    add("--tokenizer", default="", metavar="FILE", help="tokenizer.json of a real model")
    add("--template", default="", metavar="FILE", help="jinja2 chat template of a real model")
    add("--host-tokens", type=int, default=0, metavar="N", help="room in host memory for what leaves the device")
    add("--disk-tokens", type=int, default=0, metavar="N", help="room on disk for what leaves host memory")
    add("--session-refs", action="store_true", help="sglang: reference sessions until they are closed")
    add("--eviction", choices=EVICTIONS, default="lru", help="sglang: what goes first")
    add("--streaming-sessions", action="store_true", help="sglang: sessions that keep their KV may be opened")
    _event_flags(arguments)
    _connector_flags(arguments)
    rates = Rates()
    add("--step-seconds", type=float, default=rates.base, metavar="S", help="one step, before what is in it")
    add("--token-seconds", type=float, default=rates.token, metavar="S", help="one uncached prompt token")
    add("--decode-seconds", type=float, default=rates.decode, metavar="S", help="one sequence's decode in a step")
    add("--host-seconds", type=float, default=rates.host, metavar="S", help="one token restored from host memory")
    add("--disk-seconds", type=float, default=rates.disk, metavar="S", help="one token restored from disk")
    add(
        "--handshake-seconds",
        type=float,
        default=rates.handshake,
        metavar="S",
        help="one transfer of KV, before tokens",
    )
    add("--transfer-seconds", type=float, default=rates.transfer, metavar="S", help="one token of a transfer of KV")
    add("--attention-seconds", type=float, default=rates.attention, metavar="S", help="one query-key pair")
    return arguments


def _port(text: str) -> int | None:
    """``any`` is a free port, 0 none."""
    return 0 if text == "any" else int(text) or None


def _event_flags(arguments: argparse.ArgumentParser) -> None:
    add = arguments.add_argument
    add("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks behind the port")
    add("--events", type=_port, default=None, metavar="PORT", help="publish KV events on PORT + rank; any: a free one")
    add("--events-replay", type=_port, default=0, metavar="PORT", help="replay them on PORT + rank; any: a free one")
    add("--events-buffer", type=int, default=10_000, metavar="N", help="batches that can be replayed")
    add("--events-topic", default="", metavar="TEXT", help="first frame of every batch")
    add("--event-format", choices=EVENT_FORMATS, default="map", help="positional: as older vLLM builds")
    add("--event-hashes", choices=EVENT_HASHES, default="int", help="bytes: whole digests")
    add("--short-pages", action="store_true", help="sglang: tell of last pages that are not full")
    add("--offload-events", choices=OFFLOAD_EVENTS, default="placeholder", help="full: with tokens and parent")
    add("--hash-seed", type=int, default=0, metavar="N", help="two seeds give one block two hashes")


# As they are called in the options.
CONNECTOR_FLAGS = (
    "connector",
    "engine_id",
    "side_port",
    "bidirectional",
    "lease",
    "blocks_ttl",
    "load_failure",
    "late_reads",
    "bootstrap_timeout",
    "waiting_timeout",
    "heartbeat",
    "decode_radix",
    "shared_dir",
)


def _connector_flags(arguments: argparse.ArgumentParser) -> None:
    add = arguments.add_argument
    add("--connector", choices=CONNECTORS[1:], default="", help="how KV is exchanged; default: by the role")
    add("--engine-id", default="", metavar="ID", help="absent: another with every start")
    add("--side-port", type=int, default=0, metavar="PORT", help="side channel; 0 takes a free one")
    add("--bidirectional", action="store_true", help="nixl: decode engines keep KV for the next turn")
    add("--lease", type=float, default=30.0, metavar="S", help="real seconds for which a prefill engine keeps KV")
    add("--blocks-ttl", type=float, default=480.0, metavar="S", help="the same for a decode engine")
    add("--late-reads", choices=LATE_READS, default="fail", help="nixl: what is given after the lease")
    add("--bootstrap-timeout", type=float, default=300.0, metavar="S", help="sglang: prefill waits for decode")
    add("--waiting-timeout", type=float, default=300.0, metavar="S", help="sglang: decode waits for KV")
    add("--heartbeat", type=float, default=5.0, metavar="S", help="sglang: decode asks whether prefill lives")
    add("--shared-dir", default="", metavar="DIR", help="shared: the folder that engines have in common")
    add("--decode-radix", action="store_true", help="sglang: decode engines keep a prefix cache")
    add(
        "--load-failure", choices=LOAD_FAILURES, default="fail", help="what becomes of a request whose KV does not come"
    )


def options_from(arguments: argparse.Namespace) -> EngineOptions:
    """The options that the flags mean; OptionError if no engine can be started with them."""
    return EngineOptions(
        port=arguments.port,
        host=arguments.host,
        dialect=arguments.dialect,
        role=arguments.role,
        models=arguments.model or ["sim"],
        loras=arguments.lora,
        kv_tokens=arguments.kv_tokens,
        block_size=arguments.block_size,
        max_running=arguments.max_running,
        chunk_tokens=arguments.chunk_tokens,
        max_queued=arguments.max_queued,
        context_length=arguments.context_length,
        api_key=arguments.api_key,
        time_scale=arguments.time_scale,
        usage_details=not arguments.no_usage_details,
        prefix_cache=not arguments.no_prefix_cache,
        metrics=not arguments.no_metrics,
        seed=arguments.seed,
        keep_alive=arguments.keep_alive,
        tokenizer=arguments.tokenizer,
        template=arguments.template,
        host_tokens=arguments.host_tokens,
        disk_tokens=arguments.disk_tokens,
        offload_events=arguments.offload_events,
        hybrid=arguments.hybrid,
        hybrid_states=arguments.hybrid_states,
        session_refs=arguments.session_refs,
        eviction=arguments.eviction,
        streaming_sessions=arguments.streaming_sessions,
        ranks=arguments.ranks,
        events=arguments.events is not None,
        events_port=arguments.events,
        events_replay=False if arguments.events_replay is None else arguments.events_replay,
        buffer_steps=arguments.events_buffer,
        topic=arguments.events_topic,
        event_format=arguments.event_format,
        event_hashes=arguments.event_hashes,
        hash_seed=arguments.hash_seed,
        short_pages=arguments.short_pages,
        **{name: getattr(arguments, name) for name in CONNECTOR_FLAGS},
        rates=Rates(
            base=arguments.step_seconds,
            token=arguments.token_seconds,
            decode=arguments.decode_seconds,
            attention=arguments.attention_seconds,
            host=arguments.host_seconds,
            disk=arguments.disk_seconds,
            handshake=arguments.handshake_seconds,
            transfer=arguments.transfer_seconds,
        ),
    )


async def serve(options: EngineOptions) -> None:
    """Run until SIGINT or SIGTERM, then stop gracefully; a second signal kills."""
    engine = await Engine.start(options)
    print(f"listening on {engine.url}", flush=True)
    if engine.side_port is not None:
        print(f"side channel on {options.host}:{engine.side_port}", flush=True)
    if engine.events_endpoints:
        print(f"events on {' '.join(engine.events_endpoints)}", flush=True)
    if engine.replay_endpoints:
        print(f"replay on {' '.join(engine.replay_endpoints)}", flush=True)
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    await signals.get()
    stopping = asyncio.ensure_future(engine.stop())
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stopping.done():
        stopping.cancel()
        await engine.kill()


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    try:
        options = options_from(arguments.parse_args(argv))
    except OptionError as error:
        arguments.error(str(error))
    try:
        uvloop.run(serve(options))
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
