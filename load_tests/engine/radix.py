"""SGLang's radix cache: a tree over tokens, whole pages on its edges, locked along the path of each running sequence.

A sequence matches at admission, computes into pages of its own, and hands them to the tree at the end of each
prefill chunk and when it finishes (prompt and output without the last token, whose KV was never computed). Pages
that the tree already has are given back. Eviction removes whole unlocked leaves, least recently used first; before that,
where sessions are referenced, those that none refers to, and where it goes by priority, those of the lowest.
A hit is ``min(lcp, n - 1) // page * page``. (SGLang 0.5.23, mem_cache/radix_cache.py.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.hashes import Chain
from load_tests.engine.nodes import Key, Node, common_length
from load_tests.engine.tiers import Block, Sources


class RadixCache(KVCache):
    """``block_size`` is SGLang's page size; a holding keeps its deepest locked node and the pages it owns alone."""

    # Whether events tell of a finished sequence's last page when it is not full.
    tell_tails = False
    # Whether a session refers to what its requests left here, until it is closed.
    refers = False
    # Whether eviction goes by the priority of the requests that left it.
    by_priority = False

    def __init__(self, num_blocks: int, block_size: int = 1, *, reuse: bool = True, chain: Chain | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self._chain = chain
        self._ticks = count(1)
        self._serial = count()
        self._roots: dict[str, Node] = {}
        self._leaves: list[tuple[tuple[bool, int, int], int, Node]] = []
        self._referred: dict[str, list[Node]] = {}
        self._compact_at = 1024
        self._tree_pages = 0
        self._locked_pages = 0
        self._own_pages = 0

    @property
    def used_blocks(self) -> int:
        return self._locked_pages + self._own_pages

    @property
    def cached_blocks(self) -> int:
        return self._tree_pages

    @property
    def evictable_blocks(self) -> int:
        return self._tree_pages - self._locked_pages

    def match(self, holding: Holding, tokens: Sequence[int]) -> int:
        if not self.reuse:
            return 0
        key = self._whole_pages(tokens, len(tokens) - 1)
        depth, digest = self._descend(holding.namespace, key)
        return depth + self.block_size * len(self._away(holding.namespace, key[depth:], digest))

    def _descend(self, namespace: str, key: Key) -> tuple[int, bytes]:
        """How much of ``key`` is in the tree, and the hash of the last page that is."""
        node = self._roots.get(namespace)
        depth, digest = 0, b""
        while node is not None and (child := node.children.get(key[depth : depth + self.block_size])):
            shared = self._shared_pages(child.key, key[depth:])
            depth += shared
            if child.hashes:
                digest = child.hashes[shared // self.block_size - 1]
            node = child if shared == len(child.key) else None
        return depth, digest

    def _away(self, namespace: str, key: Key, digest: bytes) -> list[bytes]:
        """Hashes of the leading pages of ``key`` that are on a tier below; ``digest`` is that of the page before."""
        found: list[bytes] = []
        if self.tiers is None or self._chain is None:
            return found
        for place in range(0, len(key), self.block_size):
            digest = self._chain(digest, key[place : place + self.block_size], namespace)
            if self.tiers.find(digest) is None:
                break
            found.append(digest)
        return found

    def open(self, holding: Holding, tokens: Sequence[int], hit: int, upto: int) -> bool:
        here, digest = self._descend(holding.namespace, tuple(tokens[:hit]))
        away = self._away(holding.namespace, tuple(tokens[here:hit]), digest)
        holding.node = self._walk(holding.namespace, tuple(tokens[:here]))
        self._lock(holding.node)
        holding.published, holding.open = here, True
        holding.blocks = [0]
        # Read before room is made: that may push down the very blocks that are wanted.
        holding.sources = self._restore(away, hit)
        if not self.grow(holding, tokens, upto):
            self._release(holding)
            return False
        self._insert(holding, tuple(tokens[:hit]))
        return True

    def _restore(self, away: Sequence[bytes], hit: int) -> Sources:
        counts = [0, 0]
        for digest in away:
            assert self.tiers is not None
            counts[self.tiers.find(digest) or 0] += self.block_size
            self.tiers.use(digest)
        return Sources(hit - sum(counts), *counts)

    def grow(self, holding: Holding, tokens: Sequence[int], upto: int) -> bool:
        missing = -(-(upto - holding.published) // self.block_size) - holding.blocks[0]
        if missing <= 0:
            return True
        free = self.num_blocks - self._tree_pages - self._own_pages
        if free + self._tree_pages - self._locked_pages < missing:
            return False
        self._evict(missing - free)
        holding.blocks[0] += missing
        self._own_pages += missing
        return True

    def commit(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        if self.reuse:
            self._insert(holding, self._whole_pages(tokens, computed))

    def close(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        if not holding.open:
            return
        if self.reuse:
            key = self._whole_pages(tokens, computed)
            self._insert(holding, key)
            if self.tell_tails and len(key) == holding.published:
                self._tell_tail(holding, tokens[len(key) : computed])
            self._refer(holding)
        self._release(holding)

    def _refer(self, holding: Holding) -> None:
        node = holding.node
        if self.by_priority:
            node.priority = max(node.priority, holding.priority)
        if self.refers and holding.session and holding.session not in node.sessions:
            node.sessions.add(holding.session)
            self._referred.setdefault(holding.session, []).append(node)

    def close_session(self, session: str) -> None:
        """It refers to nothing any more."""
        for node in self._referred.pop(session, ()):
            node.sessions.discard(session)
            self._offer(node)

    def clear(self) -> bool:
        if self.used_blocks:
            return False
        self._roots.clear()
        self._leaves.clear()
        self._referred.clear()
        self._tree_pages = 0
        if self.tiers is not None:
            self.tiers.clear(0)
        if self.journal is not None:
            self.journal.cleared()
        return True

    def recount(self, holdings: Iterable[Holding]) -> int:
        nodes: dict[int, int] = {}
        own = 0
        for holding in holdings:
            if holding.open:
                own += holding.blocks[0]
                node = holding.node
                while node is not None:
                    nodes[id(node)] = len(node.key) // self.block_size
                    node = node.parent
        return own + sum(nodes.values())

    def _whole_pages(self, tokens: Sequence[int], length: int) -> Key:
        return tuple(tokens[: max(0, length) // self.block_size * self.block_size])

    def _shared_pages(self, left: Key, right: Key) -> int:
        return common_length(left, right) // self.block_size * self.block_size

    def _walk(self, namespace: str, key: Key) -> Node:
        """The node at the end of ``key``, which is in the tree; splits the edge in which it ends."""
        tick = next(self._ticks)
        node = self._roots.setdefault(namespace, Node((), None, tick))
        node.namespace = namespace
        depth = 0
        while depth < len(key):
            child = node.children[key[depth : depth + self.block_size]]
            shared = self._shared_pages(child.key, key[depth:])
            node = child if shared == len(child.key) else self._split(child, shared)
            node.used = tick
            depth += shared
        self._offer(node)
        return node

    def _split(self, node: Node, length: int) -> Node:
        upper = Node(node.key[:length], node.parent, node.used)
        upper.locks, upper.priority, upper.sessions = node.locks, node.priority, set(node.sessions)
        for session in upper.sessions:
            self._referred[session].append(upper)
        pages = length // self.block_size
        upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        assert node.parent is not None
        node.parent.children[node.key[: self.block_size]] = upper
        node.key, node.parent, node.start = node.key[length:], upper, node.start + length
        upper.children[node.key[: self.block_size]] = node
        return upper

    def _insert(self, holding: Holding, key: Key) -> None:
        """Hand the computed pages to the tree, give back those it had, and move the lock to the new end."""
        if len(key) <= holding.published:
            return
        known, _ = self._descend(holding.namespace, key)
        node = self._walk(holding.namespace, key[:known])
        if known < len(key):
            leaf = Node(key[known:], node, next(self._ticks))
            node.children[leaf.key[: self.block_size]] = leaf
            self._tree_pages += len(leaf.key) // self.block_size
            self._hash(leaf, holding, known)
            node = leaf
        pages = (len(key) - holding.published) // self.block_size
        holding.blocks[0] -= pages
        self._own_pages -= pages
        self._lock(node)
        self._unlock(holding.node)
        holding.node, holding.published = node, len(key)

    def _hash(self, leaf: Node, holding: Holding, start: int) -> None:
        """Chain the hashes of a new leaf, which begins at token ``start``, and tell of it."""
        if self._chain is None:
            return
        assert leaf.parent is not None
        before = leaf.parent.hashes[-1] if leaf.parent.hashes else None
        digest = before or b""
        for place in range(0, len(leaf.key), self.block_size):
            digest = self._chain(digest, leaf.key[place : place + self.block_size], holding.namespace)
            leaf.hashes.append(digest)
        if self.journal is not None:
            self.journal.stored(holding, leaf.hashes, before, leaf.key, start)

    def _tell_tail(self, holding: Holding, tail: Sequence[int]) -> None:
        """Tell of a last page that is not full. Nothing ever hits it; it goes with the page before it."""
        node = holding.node
        if not tail or not node.hashes or self._chain is None or self.journal is None:
            return
        digest = self._chain(node.hashes[-1], tail, holding.namespace)
        if digest not in node.tails:
            node.tails.append(digest)
            self.journal.stored(holding, [digest], node.hashes[-1], tail, node.start + len(node.key))

    def _offload(self, leaf: Node) -> None:
        """Its pages go below, last page first, so that of one prefix the end is forgotten before the start."""
        assert self.tiers is not None
        assert leaf.parent is not None
        size, start = self.block_size, leaf.start
        before = [leaf.parent.hashes[-1] if leaf.parent.hashes else None, *leaf.hashes]
        for page in range(len(leaf.hashes) - 1, -1, -1):
            tokens = leaf.key[page * size : (page + 1) * size]
            block = Block(leaf.namespace, before[page], tokens, start + page * size)
            self.tiers.offload(leaf.hashes[page], block)

    def _release(self, holding: Holding) -> None:
        self._own_pages -= holding.blocks[0]
        self._unlock(holding.node)
        holding.node, holding.blocks, holding.published, holding.open = None, [], 0, False

    def _lock(self, node: Node | None) -> None:
        while node is not None:
            if node.locks == 0:
                self._locked_pages += len(node.key) // self.block_size
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node | None) -> None:
        while node is not None:
            node.locks -= 1
            if node.locks == 0:
                self._locked_pages -= len(node.key) // self.block_size
                self._offer(node)
            node = node.parent

    def _offer(self, node: Node) -> None:
        """Enter a leaf among those that may go. Entries are checked when taken, so a stale one does no harm."""
        if node.parent is not None and not node.children and node.locks == 0:
            heapq.heappush(self._leaves, (self._worth(node), next(self._serial), node))
            if len(self._leaves) > self._compact_at:
                self._compact()

    @staticmethod
    def _worth(leaf: Node) -> tuple[bool, int, int]:
        """What is worth the least goes first."""
        return bool(leaf.sessions), leaf.priority, leaf.used

    def _valid(self, worth: tuple[bool, int, int], leaf: Node) -> bool:
        attached = leaf.parent is not None and leaf.parent.children.get(leaf.key[: self.block_size]) is leaf
        return attached and not leaf.children and leaf.locks == 0 and self._worth(leaf) == worth

    def _compact(self) -> None:
        """Drop stale entries once they outnumber the valid ones."""
        fresh = {id(entry[2]): entry for entry in self._leaves if self._valid(entry[0], entry[2])}
        self._leaves = list(fresh.values())
        heapq.heapify(self._leaves)
        self._compact_at = max(1024, 2 * len(self._leaves))

    def _evict(self, pages: int) -> None:
        while pages > 0:
            worth, _, leaf = heapq.heappop(self._leaves)
            if not self._valid(worth, leaf):
                continue
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key[: self.block_size]]
            for session in leaf.sessions:
                self._referred[session].remove(leaf)
            size = len(leaf.key) // self.block_size
            self._tree_pages -= size
            self.evicted_blocks += size
            if self.journal is not None:
                self.journal.removed([*leaf.hashes, *leaf.tails])
            if self.tiers is not None:
                self._offload(leaf)
            pages -= size
            self._offer(parent)
