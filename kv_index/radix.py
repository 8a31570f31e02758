"""RadixIndex: predicted holdings.

A compressed radix tree over symbols (8 bytes each). An edge is the `bytes` of its symbols, so following one is a memcmp;
children are found by their first symbol; where a prompt leaves an edge is found by bisection.

A node knows which targets hold its *whole* edge and when each last used it. Engines keep prefixes closed (a block is
useless without the ones before it), so whoever holds a node holds all its ancestors; `check` verifies it. That gives the
two cheap moves on which everything rests:

* match: walk down, then lay the holders' depths over each other from the root outwards, at C speed;
* evict: the engine drops the least recently used *leaf* first, and a node is a leaf for a target when none of its
  children is held by it. Each target has a heap of its leaves. The heap is lazy: an entry whose time is no longer the
  node's is pushed again when it surfaces, so using a prefix never touches the heap.

What nobody holds any more may be remembered for a while (``remember``): such nodes have no holders, stay where they are,
and tell how much of a prompt was ever seen, which is what one cache without bounds would have found.

Sizes are in pages; the caller converts tokens. Bounds: pages for each target (its engine's capacity), bytes for the
whole index, and of those for what is only remembered.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from kv_index.pages import SYMBOL

NODE_BYTES = 340
"""What a node costs beside its edge: object, its entry in the parent, tables of children and holders, a heap entry."""

HOLDER_BYTES = 140
"""What one more holder of a node costs."""

TRIM = 16
"""Pages: an edge that loses its tail loses at least so many, so that eviction page by page does not splinter it."""

REFERENCE_GRACE = 600.0
"""Seconds by which a session's reference makes a leaf look younger to eviction."""


class Match(NamedTuple):
    """What the index knows of one prompt."""

    pages: int
    """Full pages of the prompt."""
    depths: dict[int, int]
    """target -> leading pages that it is believed to hold; targets that hold none are absent."""
    seen: int
    """Leading pages that some prompt before had, whether anybody holds them still or not."""


class Node:
    """One edge of the tree and who holds it. Handed out as the place of a prompt for `pin` and `refer`."""

    __slots__ = ("below", "children", "edge", "held", "parent", "pins", "references")

    def __init__(self, edge: bytes, parent: "Node | None") -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        self.held: dict[int, float] = {}
        """target -> when it last used this edge."""
        self.below: dict[int, int] | None = None
        """target -> how many children it holds."""
        self.pins: dict[int, int] | None = None
        """target -> requests now running that end here."""
        self.references: dict[int, int] | None = None
        """target -> open engine sessions that end here."""


class _Root(Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: bytes) -> None:
        super().__init__(b"", None)
        self.namespace = namespace


class _Target:
    __slots__ = ("buried", "capacity", "evicted", "heap", "limit", "pages")

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.pages = 0
        self.evicted = 0
        self.heap: list[tuple[float, int, Node]] = []
        self.buried: set[Node] = set()
        """Leaves whose entry eviction pushed deeper for a pin or a reference: they need a new one when that ends."""
        self.limit = 4096


class RadixIndex:
    """Predicted holdings of all targets; see the module's head."""

    def __init__(self, max_bytes: int = 512 * 1024 * 1024, remember: int = 0) -> None:
        """``remember``: bytes, of ``max_bytes``, for what nobody holds any more."""
        if max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        if remember < 0:
            raise ValueError("remember must not be negative")
        self.max_bytes = max_bytes
        self.remember = remember
        self.bytes = 0
        self.remembered_bytes = 0
        self.evicted_pages = 0
        """Pages forgotten to respect a capacity or the bound, over all targets, since the start."""
        self._roots: dict[bytes, _Root] = {}
        self._targets: dict[int, _Target] = {}
        self._remembered: OrderedDict[Node, None] = OrderedDict()
        """Nodes without holders, those that lost their last one first in front."""
        self._place: Node | None = None
        """Where a prompt that is being inserted ends: whoever asked for that has no pin on it yet."""
        self._serial = 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, symbols: bytes) -> Match:
        """Who holds how much of ``symbols``. Changes nothing."""
        total = len(symbols) // SYMBOL
        node: Node | None = self._roots.get(namespace)
        depths: dict[int, int] = {}
        at, end = 0, len(symbols)
        while node is not None and at < end:
            children = node.children
            child = children.get(symbols[at : at + SYMBOL]) if children else None
            if child is None:
                break
            edge = child.edge
            if symbols.startswith(edge, at):
                at += len(edge)
            else:
                at += _common(edge, symbols, at)
                end = at
            held = child.held
            if len(held) == 1:
                for target in held:
                    depths[target] = at // SYMBOL
            else:
                depths.update(dict.fromkeys(held, at // SYMBOL))
            node = child
        return Match(total, depths, at // SYMBOL)

    def pages(self, target: int) -> int:
        """Pages that ``target`` is believed to hold."""
        state = self._targets.get(target)
        return state.pages if state else 0

    def evicted(self, target: int) -> int:
        """Pages of ``target`` forgotten to respect its capacity or the bound, since it was added."""
        state = self._targets.get(target)
        return state.evicted if state else 0

    def younger(self, target: int, than: float) -> int:
        """Pages of ``target`` that were used after ``than``. Costs what it holds."""
        state = self._targets.get(target)
        seen: set[Node] = set()
        pages = 0
        for _, _, leaf in state.heap if state is not None else ():
            node: Node | None = leaf
            while node is not None and node not in seen and node.held.get(target, -inf) > than:
                seen.add(node)
                pages += len(node.edge) // SYMBOL
                node = node.parent
        return pages

    def capacity(self, target: int) -> int | None:
        """Pages that ``target`` can hold; ``None`` when not known."""
        state = self._targets.get(target)
        return state.capacity if state else None

    def roots(self) -> Iterator[tuple[bytes, Node]]:
        """Each namespace with the node below which its prompts are."""
        yield from self._roots.items()

    # -- writing ----------------------------------------------------------------------------------------------------

    def set_capacity(self, target: int, pages: int | None) -> None:
        """Bound ``target`` to ``pages``; what no longer fits is forgotten, least recently used first."""
        if pages is not None and pages < 0:
            raise ValueError("capacity must not be negative")
        state = self._targets.setdefault(target, _Target())
        state.capacity = pages
        self._fit(target, state)
        self._bound()

    def insert(self, namespace: bytes, symbols: bytes, target: int, now: float) -> Node:
        """``target`` is about to hold all of ``symbols`` and uses them at ``now`` (seconds, never going back).

        Returns the prompt's place, for `pin` and `refer`.
        """
        state = self._targets.get(target)
        if state is None:
            state = self._targets[target] = _Target()
        if not symbols:
            return Node(b"", None)
        node: Node | None = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = _Root(namespace)
            self.bytes += NODE_BYTES
        at, end = 0, len(symbols)
        fresh = False
        while at < end:
            child = node.children.get(symbols[at : at + SYMBOL]) if node.children else None
            if child is None:
                grown = self._grow(node, symbols[at:], target, now)
                fresh = fresh and grown is node
                node = grown
                break
            edge = child.edge
            if not symbols.startswith(edge, at):
                common = _common(edge, symbols, at)
                # A prompt that ends inside an edge which its target holds anyway needs no node of its own.
                if at + common < end or target not in child.held:
                    child = self._split(child, common)
            if target in child.held:
                child.held[target] = now
                fresh = False
            else:
                self._give(child, target, now)
                fresh = True
            node = child
            at += len(child.edge)
        if fresh:
            self._push(node, target, now)
        self._place = node
        if state.capacity is not None and state.pages > state.capacity:
            self._fit(target, state, node)
        self._bound()
        self._place = None
        return node

    def pin(self, place: Node, target: int) -> None:
        """A request that ends at ``place`` runs on ``target``: its blocks cannot be evicted there. Pair with `unpin`."""
        if place.pins is None:
            place.pins = {}
        place.pins[target] = place.pins.get(target, 0) + 1

    def unpin(self, place: Node, target: int) -> None:
        """The request ended."""
        place.pins = _less(place.pins, target)
        if place.pins is None or target not in place.pins:
            self._surface(place, target)

    def refer(self, place: Node, target: int) -> None:
        """A session that the engine knows refers to ``place``: evicted later than others. Pair with `unrefer`."""
        if place.references is None:
            place.references = {}
        place.references[target] = place.references.get(target, 0) + 1

    def unrefer(self, place: Node, target: int) -> None:
        """The session was closed or went elsewhere."""
        place.references = _less(place.references, target)
        if place.references is None or target not in place.references:
            self._surface(place, target)

    def forget(self, namespace: bytes, symbols: bytes, target: int, keep: int, used_by: float | None = None) -> None:
        """``target`` holds at most ``keep`` pages of ``symbols``: drop what is believed beyond, and what hangs below it.

        With ``used_by`` only what ``target`` has not used after that time: what others believe with good reason stays.
        """
        node: Node | None = self._roots.get(namespace)
        at, end, limit = 0, len(symbols), keep * SYMBOL
        while node is not None and at < end and limit < end:
            child = node.children.get(symbols[at : at + SYMBOL]) if node.children else None
            if child is None or target not in child.held:
                return
            past = at + len(child.edge)
            if past > limit and (used_by is None or child.held[target] <= used_by):
                if at < limit:
                    if _common(child.edge, symbols, at) <= limit - at:
                        # What stands behind the kept part is another prompt's.
                        return
                    node = self._split(child, limit - at)
                self._strip(child, target)
                self._became_leaf(node, target)
                self._bound()
                return
            if not symbols.startswith(child.edge, at):
                return
            node, at = child, past

    def remove(self, target: int) -> None:
        """Forget ``target`` altogether: removed, restarted, or its cache was reset. Costs what it holds."""
        state = self._targets.pop(target, None)
        if state is None:
            return
        for _, _, leaf in state.heap:
            node: Node | None = leaf
            while node is not None and node.parent is not None and _is_leaf(node, target):
                parent = node.parent
                self._take(node, target, state)
                node = parent
        self._bound()

    def clear(self, target: int) -> None:
        """Forget what ``target`` holds but keep its capacity."""
        capacity = self.capacity(target)
        self.remove(target)
        if capacity is not None:
            self.set_capacity(target, capacity)

    # -- shape ------------------------------------------------------------------------------------------------------

    def _grow(self, node: Node, rest: bytes, target: int, now: float) -> Node:
        """Hang ``rest`` below ``node``, or lengthen ``node`` itself where nobody could tell the difference."""
        if (
            node.parent is not None
            and not node.children
            and node.pins is None
            and node.references is None
            and len(node.held) == 1
            and target in node.held
        ):
            node.edge += rest
            node.held[target] = now
            self._targets[target].pages += len(rest) // SYMBOL
            self.bytes += len(rest)
            return node
        leaf = Node(rest, node)
        if node.children is None:
            node.children = {}
        node.children[rest[:SYMBOL]] = leaf
        self.bytes += NODE_BYTES + len(rest)
        self._give(leaf, target, now)
        self._push(leaf, target, now)
        return leaf

    def _split(self, node: Node, common: int) -> Node:
        """Cut ``node`` after ``common`` bytes; returns the new upper part. ``node`` stays the lower one, with its pins."""
        upper = Node(node.edge[:common], node.parent)
        node.edge = node.edge[common:]
        parent = node.parent
        assert parent is not None and parent.children is not None
        parent.children[upper.edge[:SYMBOL]] = upper
        node.parent = upper
        upper.children = {node.edge[:SYMBOL]: node}
        upper.held = node.held.copy()
        upper.below = dict.fromkeys(node.held, 1) or None
        self.bytes += NODE_BYTES + HOLDER_BYTES * len(upper.held)
        if not node.held:
            self._remembered[upper] = None
            self.remembered_bytes += NODE_BYTES
        return upper

    def _give(self, node: Node, target: int, now: float) -> None:
        if not node.held and node in self._remembered:
            del self._remembered[node]
            self.remembered_bytes -= NODE_BYTES + len(node.edge)
        node.held[target] = now
        self._targets[target].pages += len(node.edge) // SYMBOL
        self.bytes += HOLDER_BYTES
        parent = node.parent
        if parent is not None and parent.parent is not None:
            if parent.below is None:
                parent.below = {}
            parent.below[target] = parent.below.get(target, 0) + 1

    def _take(self, node: Node, target: int, state: _Target) -> None:
        """``target`` no longer holds ``node``; no child of it may be held by ``target``."""
        del node.held[target]
        state.buried.discard(node)
        state.pages -= len(node.edge) // SYMBOL
        self.bytes -= HOLDER_BYTES
        if node.pins:
            node.pins.pop(target, None)
        if node.references:
            node.references.pop(target, None)
        parent = node.parent
        assert parent is not None
        if parent.below is not None:
            parent.below = _less(parent.below, target)
        if not node.held and self.remember:
            self._remembered[node] = None
            self.remembered_bytes += NODE_BYTES + len(node.edge)
            self._join_only(node)
        else:
            self._tidy(node)

    def _tidy(self, node: Node) -> None:
        """Give back nodes that nobody holds, and join a node with its only child when the same targets hold both."""
        while node.parent is not None and not node.held:
            parent = node.parent
            assert not node.children and parent.children is not None
            del parent.children[node.edge[:SYMBOL]]
            self.bytes -= NODE_BYTES + len(node.edge)
            node.parent = None
            node = parent
        if node.parent is None:
            if isinstance(node, _Root) and not node.children and self._roots.pop(node.namespace, None) is not None:
                self.bytes -= NODE_BYTES
            return
        self._join_only(node)

    def _join_only(self, node: Node) -> None:
        if node.children and len(node.children) == 1:
            (child,) = node.children.values()
            spared = node.pins or node.references or node is self._place
            if child.held.keys() == node.held.keys() and not spared:
                self._join(node, child)

    def _join(self, node: Node, child: Node) -> None:
        """Prepend ``node``'s edge to its only child, which keeps its identity (it may be somebody's place)."""
        parent = node.parent
        assert parent is not None and parent.children is not None
        child.edge = node.edge + child.edge
        child.parent = parent
        parent.children[child.edge[:SYMBOL]] = child
        self.bytes -= NODE_BYTES + HOLDER_BYTES * len(node.held)
        if not node.held:
            del self._remembered[node]
            self.remembered_bytes -= NODE_BYTES
        node.parent, node.children, node.held, node.below = None, None, {}, None

    def _strip(self, node: Node, target: int) -> None:
        """``target`` holds neither ``node`` nor anything below it any more."""
        state = self._targets[target]
        todo, order = [node], []
        while todo:
            at = todo.pop()
            order.append(at)
            if at.below and target in at.below and at.children:
                todo.extend(child for child in at.children.values() if target in child.held)
        for at in reversed(order):
            # Taking one may have joined another with its only child, which is taken with all that it absorbed.
            if target in at.held:
                self._take(at, target, state)

    # -- eviction ---------------------------------------------------------------------------------------------------

    def _push(self, node: Node, target: int, stamp: float) -> None:
        state = self._targets[target]
        if stamp > node.held[target]:
            # A pin or a reference makes it seem younger; when that ends it needs another entry.
            state.buried.add(node)
        self._serial += 1
        heappush(state.heap, (stamp, self._serial, node))
        if len(state.heap) > state.limit:
            self._compact(target, state)

    def _compact(self, target: int, state: _Target) -> None:
        """Drop entries that no longer name a leaf of ``target``, and repeats."""
        seen: set[int] = set()
        kept = []
        for entry in state.heap:
            node = entry[2]
            if id(node) not in seen and _is_leaf(node, target):
                seen.add(id(node))
                if node.pins or node.references:
                    state.buried.add(node)
                kept.append((_age(node, target), entry[1], node))
        heapify(kept)
        state.heap = kept
        state.limit = 3 * len(kept) + 4096

    def _surface(self, node: Node, target: int) -> None:
        """``node`` became easier to evict for ``target``: its entry may stand too deep in the heap."""
        state = self._targets.get(target)
        if state is not None and node in state.buried:
            state.buried.discard(node)
            if _is_leaf(node, target):
                self._push(node, target, _age(node, target))

    def _became_leaf(self, node: Node, target: int) -> None:
        if node.parent is not None and _is_leaf(node, target):
            self._push(node, target, _age(node, target))

    def _fit(self, target: int, state: _Target, sparing: Node | None = None) -> None:
        if state.capacity is not None:
            self._evict(target, state, state.pages - state.capacity, sparing)

    def _evict(self, target: int, state: _Target, excess: int, sparing: Node | None = None) -> int:
        """Forget about ``excess`` pages of ``target``, oldest leaves first; running prompts and ``sparing`` stay.

        Returns the pages forgotten: fewer than ``excess`` only when all that is left is spared.
        """
        gone = 0
        spared: list[tuple[float, int, Node]] = []
        while gone < excess and state.heap:
            stamp, serial, node = state.heap[0]
            if not _is_leaf(node, target):
                heappop(state.heap)
                continue
            age = _age(node, target)
            if age != stamp:
                if node.pins or node.references:
                    state.buried.add(node)
                heapreplace(state.heap, (age, serial, node))
                continue
            if age == inf or node is sparing:
                spared.append(heappop(state.heap))
                if age == inf:
                    break
                continue
            pages = len(node.edge) // SYMBOL
            cut = max(excess - gone, TRIM)
            if cut >= pages:
                heappop(state.heap)
                parent = node.parent
                self._take(node, target, state)
                if parent is not None and target in parent.held:
                    self._became_leaf(parent, target)
                gone += pages
            else:
                self._trim(node, target, state, cut)
                gone += cut
        for entry in spared:
            heappush(state.heap, entry)
        state.evicted += gone
        self.evicted_pages += gone
        return gone

    def _trim(self, node: Node, target: int, state: _Target, cut: int) -> None:
        """Take the last ``cut`` pages of a leaf's edge from ``target``."""
        keep = len(node.edge) - cut * SYMBOL
        if len(node.held) == 1 and (not node.children or len(node.children) == 1):
            # A leaf of the only one who holds it: what is below it, if anything, is only remembered.
            tail, node.edge = node.edge[keep:], node.edge[:keep]
            state.pages -= cut
            if self.remember:
                self._keep_tail(node, tail)
            else:
                self.bytes -= len(tail)
            return
        upper = self._split(node, keep)
        # `node` is the lower part now: the one that goes.
        self._take(node, target, state)
        self._became_leaf(upper, target)

    def _keep_tail(self, node: Node, tail: bytes) -> None:
        """``tail`` was cut off ``node``'s edge: remember it, in front of what is remembered below."""
        if node.children:
            (below,) = node.children.values()
            below.edge = tail + below.edge
        else:
            below = Node(tail, node)
            self._remembered[below] = None
            self.bytes += NODE_BYTES
            self.remembered_bytes += NODE_BYTES
        node.children = {tail[:SYMBOL]: below}
        self.remembered_bytes += len(tail)

    def _bound(self) -> None:
        if self.remembered_bytes > self.remember:
            self._drop(self.remembered_bytes - self.remember)
        if self.bytes > self.max_bytes:
            self._shrink()

    def _drop(self, excess: int) -> None:
        """Remember ``excess`` bytes less, or nothing."""
        aim = self.remembered_bytes - excess
        while self.remembered_bytes > aim and self._remembered:
            node, _ = self._remembered.popitem(last=False)
            if node.children:
                # What is below it goes first.
                self._remembered[node] = None
                continue
            parent = node.parent
            assert parent is not None and parent.children is not None
            del parent.children[node.edge[:SYMBOL]]
            node.parent = None
            self.bytes -= NODE_BYTES + len(node.edge)
            self.remembered_bytes -= NODE_BYTES + len(node.edge)
            if parent.held or parent.parent is None:
                self._tidy(parent)
            else:
                self._join_only(parent)

    def _shrink(self) -> None:
        """Bring the whole index under its bound: what is only remembered goes first, then some of whoever holds most, a little
        more than needed."""
        aim = self.max_bytes - self.max_bytes // 64
        self._drop(self.bytes - aim)
        while self.bytes > aim and self._targets:
            gone = 0
            ranked = sorted(self._targets.items(), key=lambda item: -item[1].pages)
            for target, state in ranked:
                gone += self._evict(target, state, max(state.pages // 16, TRIM))
                self._drop(self.remembered_bytes)
                if self.bytes <= aim:
                    return
            if not gone:
                # Only pinned prompts are left: the bound comes before what they would tell.
                self.clear(ranked[0][0])
                self._drop(self.remembered_bytes)
                if not ranked[0][1].pages:
                    return

    # -- for tests --------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[tuple[bytes, Node]]:
        """Every node with its namespace, roots included."""
        for namespace, root in self._roots.items():
            todo: list[Node] = [root]
            while todo:
                node = todo.pop()
                yield namespace, node
                if node.children:
                    todo.extend(node.children.values())

    def check(self) -> None:
        """Verify every invariant; raises AssertionError naming the first that does not hold. Costs the whole index."""
        pages = dict.fromkeys(self._targets, 0)
        size = remembered = 0
        for _, node in self.nodes():
            size += NODE_BYTES + len(node.edge) + HOLDER_BYTES * len(node.held)
            if node.parent is None:
                assert not node.held and not node.edge, "a root holds nothing"
                assert node.children, "an empty namespace is given back"
            else:
                if not node.held:
                    assert node in self._remembered, "a node that nobody holds is remembered or given back"
                    remembered += NODE_BYTES + len(node.edge)
                assert node.edge and len(node.edge) % SYMBOL == 0, "an edge is whole symbols"
            for first, child in (node.children or {}).items():
                assert child.parent is node and child.edge[:SYMBOL] == first, "children hang where they say"
                if node.parent is not None:
                    assert child.held.keys() <= node.held.keys(), "holders of a node hold its ancestors"
                    for target, stamp in child.held.items():
                        assert stamp <= node.held[target], "an ancestor is never older than what is below it"
            for target in node.held:
                pages[target] += len(node.edge) // SYMBOL
                count = sum(target in child.held for child in (node.children or {}).values())
                assert (node.below or {}).get(target, 0) == count, "children held are counted"
                if count == 0:
                    heap = self._targets[target].heap
                    assert any(e[2] is node and e[0] <= _age(node, target) for e in heap), "a leaf is in its heap"
        for target, state in self._targets.items():
            assert state.pages == pages[target], "pages are counted"
        assert size == self.bytes, "bytes are counted"
        assert remembered == self.remembered_bytes <= self.remember, "what is remembered is counted, and bounded"
        assert all(not node.held and node.parent is not None for node in self._remembered), "only what nobody holds is"


def _common(edge: bytes, symbols: bytes, at: int) -> int:
    """Bytes of whole symbols that ``edge`` and ``symbols[at:]`` share, by bisection; their first symbol is equal."""
    low, high = SYMBOL, min(len(edge), len(symbols) - at)
    if symbols.startswith(edge[:high], at):
        return high
    while high - low > SYMBOL:
        middle = (low + high) // (2 * SYMBOL) * SYMBOL
        if symbols.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle
    return low


def _is_leaf(node: Node, target: int) -> bool:
    return target in node.held and not (node.below and target in node.below)


def _age(node: Node, target: int) -> float:
    """When ``target`` used ``node``, as eviction sees it."""
    if node.pins and target in node.pins:
        return inf
    stamp = node.held[target]
    if node.references and target in node.references:
        return stamp + REFERENCE_GRACE
    return stamp


def _less(counts: dict[int, int] | None, target: int) -> dict[int, int] | None:
    if counts is None or target not in counts:
        return counts
    counts[target] -= 1
    if counts[target] <= 0:
        del counts[target]
    return counts or None
