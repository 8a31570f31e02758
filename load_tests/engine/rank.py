"""One data-parallel rank of an engine: a cache, a scheduler and a driver of its own, and what it publishes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from load_tests.engine.blocks import BlockCache
from load_tests.engine.cache import KVCache
from load_tests.engine.driver import Driver
from load_tests.engine.hashes import sglang_chain, vllm_chain
from load_tests.engine.hybrid import HybridCache, HybridJournal
from load_tests.engine.journal import Journal, SglangJournal, VllmJournal
from load_tests.engine.metrics import Measures
from load_tests.engine.options import EngineOptions
from load_tests.engine.publisher import Publisher
from load_tests.engine.radix import RadixCache
from load_tests.engine.scheduler import Scheduler
from load_tests.engine.slots import SlotCache
from load_tests.engine.tiers import Tiers
from load_tests.engine.work import Step

# SGLang publishes after this many decode steps in a row (its --decode-log-interval).
DECODE_INTERVAL = 40


def make_journal(options: EngineOptions) -> Journal | None:
    if not options.publishes:
        return None
    if options.dialect == "sglang":
        return SglangJournal(options.block_size)
    kind = HybridJournal if options.hybrid else VllmJournal
    placeholders = options.offload_events == "placeholder"
    size, hashes, form = options.block_size, options.event_hashes, options.event_format
    return kind(size, hashes=hashes, form=form, placeholders=placeholders)


def make_cache(options: EngineOptions) -> KVCache:
    """The cache that the options mean, with its journal."""
    cache = _attention_cache(options)
    cache.journal = make_journal(options)
    host, disk = options.host_tokens // options.block_size, options.disk_tokens // options.block_size
    if host or disk:
        cache.tiers = Tiers(host, disk, cache.journal)
    if not options.hybrid:
        return cache
    hybrid = HybridCache(cache, options.hybrid, options.hybrid_states)
    if isinstance(cache.journal, HybridJournal):
        cache.journal.marks = hybrid.marks
    hybrid.journal, hybrid.tiers = cache.journal, cache.tiers
    return hybrid


def _attention_cache(options: EngineOptions) -> KVCache:
    size, reuse = options.block_size, options.prefix_cache
    if options.connector == "bootstrap" and options.role == "decode":
        reuse = reuse and options.decode_radix
    if options.dialect == "sglang":
        hashed = options.publishes or options.host_tokens or options.disk_tokens
        chain = sglang_chain(options.hash_seed) if hashed else None
        cache = RadixCache(options.num_blocks, size, reuse=reuse, chain=chain)
        cache.tell_tails = options.short_pages
        cache.refers, cache.by_priority = options.session_refs, options.eviction == "priority"
        return cache
    if options.dialect == "llamacpp":
        return SlotCache(options.max_running, options.context_length, reuse=reuse)
    if options.publishes:
        return BlockCache(options.num_blocks, size, reuse=reuse, chain=vllm_chain(options.hash_seed))
    return BlockCache(options.num_blocks, size, reuse=reuse)


class Rank:
    """``number`` is the rank's own; ``publisher`` is None where no events are published."""

    def __init__(self, options: EngineOptions, number: int, publisher: Publisher | None) -> None:
        self.number = number
        self.measures = Measures()
        self.publisher = publisher
        self._paced = options.dialect == "sglang"
        self._decodes = 0
        self.cache = make_cache(options)
        self.journal = self.cache.journal
        self.scheduler = Scheduler(
            self.cache,
            options.rates,
            max_running=options.max_running,
            chunk_tokens=options.chunk_tokens,
            # SGLang's limit does not apply to halves of requests.
            max_queued=None if options.connector == "bootstrap" else options.max_queued,
        )
        self.driver = Driver(self.scheduler, options.time_scale, self.stepped if publisher else None)

    @property
    def load(self) -> int:
        """Sequences that run or wait, for KV from elsewhere as well."""
        return sum(map(len, (self.scheduler.running, self.scheduler.waiting, self.scheduler.receiving)))

    def stepped(self, step: Step) -> None:
        """A step has been executed. vLLM publishes after each; SGLang after prefill, now and then, and when idle."""
        if self._paced:
            self._decodes = 0 if step.prefill_tokens else self._decodes + 1
            due = step.prefill_tokens > 0 or self._decodes % DECODE_INTERVAL == 0 or not self.scheduler.busy
        else:
            due = bool(step.work)
        if due:
            self.publish()

    def publish(self) -> None:
        """Send what has gathered, as one batch; nothing if nothing has."""
        if self.journal is not None and self.publisher is not None and (events := self.journal.take()):
            self.publisher.publish(events)

    def clear(self, below: bool = False) -> bool:
        """Forget the cache; False while it is in use. SGLang tells at once, vLLM with the next step it executes.

        SGLang forgets host memory as well, vLLM all tiers if ``below``.
        """
        done = self.cache.clear()
        if done and below and self.cache.tiers is not None:
            self.cache.tiers.clear()
        if done and self._paced and not self.scheduler.busy:
            self.publish()
        return done

    def stats(self) -> dict[str, Any]:
        """This rank's part of GET /sim/stats."""
        scheduler, cache = self.scheduler, self.cache
        held = cache.recount(scheduler.holdings())
        return {
            **asdict(scheduler.totals),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_blocks": cache.num_blocks,
            "kv_blocks_used": held,
            "kv_blocks_cached": cache.cached_blocks,
            "kv_blocks_leaked": cache.used_blocks - held,
            "evicted_blocks": cache.evicted_blocks,
            "host_blocks": cache.tiers.used[0] if cache.tiers else 0,
            "disk_blocks": cache.tiers.used[1] if cache.tiers else 0,
        }
