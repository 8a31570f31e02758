"""The starts that many sessions share, and engines that get them before their sessions come.

Template parameters, tools and system prompt are the same for all sessions of one application: their first prompts begin with
one *root*. An engine that joins, starts anew or lost its cache computes it for the first session of each that comes; instead
it is sent the most wanted ones, with one token to generate, while it has nothing else to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import exp
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from gateway.asks import Ask
from gateway.engines import Answer
from gateway.errors import GatewayFault, WorkerFault
from gateway.fleet import SLOW_START, Fleet
from gateway.metrics import Metrics
from gateway.prompt import Prompt
from gateway.workers import State, Target, Worker
from kv_index.index import PrefixIndex
from kv_index.pages import SYMBOL, TEXT_PAGE
from policies.base import Role

log = logging.getLogger("warmroute")

LEAST = 4 * TEXT_PAGE
"""Bytes of the shortest root: less is computed in no time."""
MOST = 512
"""Roots that are counted."""
MOST_BYTES = 8 * 1024 * 1024
"""Of bodies that are kept, for those that several sessions share."""
SHARED_BY = 2
"""Sessions that make a start shared."""
FADE = 600.0
"""Seconds over which sessions are counted."""
IDLE = 0.02
"""Seconds of work in front of a request with which a target still counts as idle."""
LOOK = 0.1
"""Seconds between two looks at a target that is busy."""
ANSWER = 60.0
"""Seconds that an engine may take for one root."""
HELD = 0.9
"""The part of a root whose being held makes sending it a waste."""

KEPT = frozenset(
    (
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "documents",
        "tools",
        "tool_choice",
        "thinking",
        "system",
        "instructions",
        "cache_salt",
        "extra_key",
        "lora_path",
    )
)
"""Members of a body that make up the start of its prompt, or keep its cache apart."""

Post = Callable[..., Awaitable[Answer]]
"""(worker, path, method, body, headers, seconds): a worker's answer. Raises `WorkerFault` or `GatewayFault`."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_messages = msgspec.json.Decoder(list[msgspec.Raw])


class _Role(msgspec.Struct):
    role: str | None = None


_role = msgspec.json.Decoder(_Role)


class Root:
    """One shared start."""

    __slots__ = ("at", "body", "count", "model", "namespace", "path", "size", "symbols")

    def __init__(self, model: str, size: int, now: float) -> None:
        self.model = model
        self.size = size
        """Bytes."""
        self.count = 0.0
        """Sessions, those of long ago counted less."""
        self.at = now
        """When the last of them began."""
        self.body: bytes | None = None
        """A request that makes an engine compute it."""
        self.path = ""
        self.namespace = b""
        self.symbols = b""
        """Of its full pages, where it was routed by text."""

    def saw(self, now: float) -> float:
        """One more session begins with it; how many do."""
        self.count = self.wanted(now) + 1.0
        self.at = now
        return self.count

    def wanted(self, now: float) -> float:
        """Sessions that began with it lately."""
        return self.count * exp((self.at - now) / FADE)


class Roots:
    """Those of every model, bounded. Times are seconds on the loop's clock."""

    def __init__(self) -> None:
        self._roots: OrderedDict[bytes, Root] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._roots)

    def saw(self, ask: Ask, prompt: Prompt, path: bytes, body: bytes, salt: str | None, now: float) -> None:
        """A new session begins with ``prompt``, asked by ``body`` on ``path``. ``salt``: what the gateway keeps the tenant's
        cache apart with."""
        if len(prompt.text) < LEAST or ask.model is None:
            return
        size = prompt.lead
        if size < LEAST:
            return
        key = xxh3_128_digest(ask.namespace + memoryview(prompt.text)[:size])
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= MOST:
                self._drop(next(iter(self._roots)))
            root = self._roots[key] = Root(ask.model.name, size, now)
        else:
            self._roots.move_to_end(key)
        if root.saw(now) < SHARED_BY - 0.5 or root.body is not None:
            return
        made = warming_body(path, body, root.model, salt)
        if made is None or len(made) > MOST_BYTES:
            return
        root.body, root.path, root.namespace = made, path.decode(), ask.namespace
        if ask.ids is None:
            root.symbols = ask.pages.symbols[: size // TEXT_PAGE * SYMBOL]
        self.bytes += len(made)
        while self.bytes > MOST_BYTES:
            self._drop(min(self._roots, key=lambda key: self._roots[key].at if self._roots[key].body else now + 1))

    def _drop(self, key: bytes) -> None:
        gone = self._roots.pop(key)
        self.bytes -= len(gone.body or b"")

    def top(self, models: list[str], most: int, now: float) -> list[Root]:
        """The most wanted ones of these models (none given: of any), the one that saves most first."""
        able = [root for root in self._roots.values() if root.body is not None and (not models or root.model in models)]
        return sorted(able, key=lambda root: -root.wanted(now) * root.size)[:most]


def warming_body(path: bytes, body: bytes, model: str, salt: str | None) -> bytes | None:
    """A request for one token whose prompt begins as that of ``body`` does, up to its first message that is not the system's.

    ``None`` for a path, or a body, that is not understood.
    """
    try:
        members = _members.decode(body)
        told: dict[str, Any] = {name: raw for name, raw in members.items() if name in KEPT}
        user: Any = {"role": "user", "content": "."}
        if path == b"/v1/chat/completions":
            system = _system(_messages.decode(members.get("messages", msgspec.Raw(b"[]"))))
            told |= {"messages": [*system, user], "max_tokens": 1}
        elif path == b"/v1/messages":
            told |= {"messages": [user], "max_tokens": 1}
        elif path == b"/v1/responses":
            told |= {"input": ".", "max_output_tokens": 1, "store": False}
        else:
            return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if salt is not None:
        told["cache_salt"] = salt
    return msgspec.json.encode({"model": model, **told, "stream": False})


def _system(messages: list[msgspec.Raw]) -> list[msgspec.Raw]:
    for at, message in enumerate(messages):
        if _role.decode(message).role not in ("system", "developer"):
            return messages[:at]
    return messages


class Warming:
    """Sends roots to engines whose caches are empty. ``most``: roots for each; ``seconds``: how long that may take."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        roots: Roots,
        metrics: Metrics,
        post: Post,
        *,
        most: int = 8,
        seconds: float = SLOW_START,
    ) -> None:
        self.fleet = fleet
        self.index = index
        self.roots = roots
        self.metrics = metrics
        self.most = most
        self.seconds = seconds
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """target id -> its task."""

    def empty(self, target_id: int) -> None:
        """The cache of a target is empty now."""
        target = self.fleet.targets.get(target_id)
        if not self.most or target is None or target.worker.state is not State.READY:
            return
        # A foreign endpoint has a price; a role that cannot serve alone is warmed by its pairs.
        if target.worker.facts.engine == "generic" or target.role is not Role.UNIFIED:
            return
        models = [model.name for model in target.worker.facts.models]
        if not self.roots.top(models, 1, self.fleet.clock()):
            return
        before = self._tasks.pop(target_id, None)
        if before is not None:
            before.cancel()
        task = asyncio.get_running_loop().create_task(self._warm(target, models), name=f"warm {target.name}")
        self._tasks[target_id] = task
        task.add_done_callback(lambda done: self._tasks.pop(target_id) if self._tasks.get(target_id) is done else None)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm(self, target: Target, models: list[str]) -> None:
        epoch, until = target.epoch, self.fleet.clock() + self.seconds
        room = None if target.room is None else target.room // 4
        for root in self.roots.top(models, self.most, self.fleet.clock()):
            while not self._spare(target):
                await asyncio.sleep(LOOK)
                if self.fleet.clock() > until:
                    return
            if target.epoch != epoch or self.fleet.targets.get(target.id) is not target:
                return
            tokens = max(1, round(root.size / 4))
            if self._holds(root, target) or (room is not None and tokens > room):
                continue
            if room is not None:
                room -= tokens
            status = await self._send(root, target, tokens)
            if status is None or status in (401, 403):
                # It does not answer, or not to us: others would fare no better.
                return

    def _spare(self, target: Target) -> bool:
        """Whether nothing would wait for it."""
        now = self.fleet.clock()
        return self.fleet.usable(target, now) and target.waits(now) <= IDLE and not (target.running - target.busy > 0)

    def _holds(self, root: Root, target: Target) -> bool:
        if not root.symbols:
            return False
        pages = len(root.symbols) // SYMBOL
        return self.index.radix.match(root.namespace, root.symbols).depths.get(target.id, 0) >= HELD * pages

    async def _send(self, root: Root, target: Target, tokens: int) -> int | None:
        """The status of the answer; ``None`` if none came."""
        worker: Worker = target.worker
        headers = {"x-data-parallel-rank": str(target.rank)} if len(worker.targets) > 1 else None
        charge = self.fleet.dispatch(target, tokens, 0, False)
        sent = self.fleet.clock()
        place = self.index.sent(root.namespace, root.symbols, target.id, sent, False) if root.symbols else None
        outcome, status = "failed", None
        try:
            answer = await self._post(worker, root.path, "POST", root.body, headers, ANSWER)
            status = answer.status
            outcome = "warmed" if answer.status == 200 else "refused"
        except (WorkerFault, GatewayFault) as fault:
            log.debug("%s was not warmed: %s", target.name, fault)
        finally:
            self.fleet.release(charge)
            if place is not None:
                if outcome == "warmed":
                    now = self.fleet.clock()
                    self.index.landed(root.namespace, root.symbols, target.id, place, sent, now)
                else:
                    self.index.undone(root.namespace, root.symbols, target.id, place, 0, sent)
        if target.id in self.fleet.targets:
            self.metrics.warmed.add((target.name, outcome))
        return status
