"""One target's cache: its groups, and what each needs for a prompt to be reusable."""

from collections.abc import Sequence
from enum import IntEnum
from math import lcm

from kv_index.pages import PAGE_TOKENS
from kv_index.slab import Slab


class Tier(IntEnum):
    """Where a block lies; from below the device it must be restored before it is used."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


TIERS = len(Tier)


class Kind(IntEnum):
    """What a cache group needs for a prompt to be reusable up to some token."""

    FULL = 0
    """Every block before it."""
    STATE = 1
    """The recurrent state at exactly that token."""
    WINDOW = 2
    """The blocks of the last ``window`` tokens before it."""


class Group:
    """One cache group of one target. Of kind `Kind.FULL` it has a bit of its own among the holders."""

    __slots__ = (
        "bit",
        "copies",
        "deep",
        "gone",
        "holes",
        "kind",
        "own",
        "recalled",
        "size",
        "slab",
        "stride",
        "there",
        "twins",
        "window",
    )

    def __init__(self, kind: Kind, size: int, window: int, bit: int) -> None:
        self.kind = kind
        self.size = size
        """Tokens in one block."""
        self.window = window
        self.bit = bit
        unit = lcm(size, PAGE_TOKENS)
        self.stride = unit // PAGE_TOKENS
        """Pages from one prefix that can be named to the next."""
        self.own: tuple[dict[int, int], ...] = tuple({} for _ in range(TIERS))
        """Tier -> engine hash -> prefix."""
        self.copies: dict[tuple[int, int], int] = {}
        """(tier, engine hash) -> copies beyond the first: each is removed by itself."""
        self.twins: dict[tuple[int, int], int] = {}
        """(tier, prefix) -> further engine hashes of the same tokens."""
        self.holes: set[int] = set()
        """Prefixes that went while something behind them stayed; some may be closed again."""
        self.deep = False
        """Whether anything ever lay below the device."""
        self.gone = False
        """Its target dropped it; what is left of it waits for `BlockIndex.sweep`."""
        self.recalled: dict[int, int] = {}
        """Engine hash -> prefix of the last blocks that left the device: a lower tier may tell of them after that."""
        self.there: dict[int, int] = {}
        """Of other kinds than full: prefix -> how many of its blocks are held, on any tier."""
        self.slab: Slab | None = Slab(size, unit) if unit != size and kind is Kind.FULL else None

    def name(self, hash: int) -> int | None:
        """The prefix of the block that the engine calls ``hash``."""
        for own in self.own:
            found = own.get(hash)
            if found is not None:
                return found
        return None


class Cache:
    """What one target's events are about."""

    __slots__ = ("full", "groups", "id", "others", "sizes")

    def __init__(self, id: int, sizes: dict[int, int]) -> None:
        self.id = id
        self.sizes = sizes
        """Number of a full group -> tokens in its blocks, as far as they are known before it stores any."""
        self.groups: dict[int, Group] = {}
        self.full: list[Group] = []
        self.others: list[Group] = []

    @property
    def plain(self) -> bool:
        """Whether bisection tells all of it."""
        if self.others or len(self.full) != 1:
            return False
        group = self.full[0]
        return not group.holes and not group.deep and group.slab is None


def resumable(groups: Sequence[Group], chain: Sequence[int], depth: int) -> int:
    """The last token up to ``depth`` at which every one of ``groups`` lets a prompt be resumed."""
    pages = depth // PAGE_TOKENS
    step = lcm(*[group.stride for group in groups])
    windows = [_windows(group, chain, pages) for group in groups if group.kind is Kind.WINDOW]
    states = [group.there for group in groups if group.kind is not Kind.WINDOW]
    for at in range(pages // step * step, 0, -step):
        if all(chain[at - 1] in there for there in states) and all(at in able for able in windows):
            return at * PAGE_TOKENS
    return 0


def _windows(group: Group, chain: Sequence[int], pages: int) -> set[int]:
    """The pages at whose end ``group`` has the blocks of its window."""
    able, run = set(), 0
    for at in range(group.stride, pages + 1, group.stride):
        run = run + group.stride if chain[at - 1] in group.there else 0
        if run == at or run * PAGE_TOKENS >= group.window - 1:
            able.add(at)
    return able
