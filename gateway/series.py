"""Counters, histograms and gauges: plain dictionaries, to which the hot path adds, and their lines of text.

prometheus-client's own metric objects take a lock and a look-up for each label set and would cost more than the rest of a small
request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from gateway.exposition import LINES, Head, Labels, braced, number


class Counter:
    """A monotonic sum for each label set. Its series are called ``name`` with ``_total`` behind it."""

    __slots__ = ("head", "help", "labels", "name", "values")
    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.values: dict[Labels, list[float]] = {}
        self.head = Head(name + "_total", help, self.kind, labels)

    def cell(self, labels: Labels = ()) -> list[float]:
        """The one-element list that holds the sum: for whoever adds to it often."""
        cell = self.values.get(labels)
        if cell is None:
            cell = self.values[labels] = [0.0]
        return cell

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        """Add ``amount``."""
        self.cell(labels)[0] += amount

    def pieces(self) -> Iterator[str]:
        """Its text, in pieces."""
        yield self.head.intro
        rows = iter(list(self.values.items()))
        while some := list(islice(rows, LINES)):
            of = self.head.of
            # Some may have gone since the piece before.
            values = self.values
            yield "".join([f"{of(labels)}{number(cell[0])}\n" for labels, cell in some if labels in values])

    def drop(self, position: int, value: str) -> None:
        """Remove the series whose label at ``position`` is ``value``."""
        for labels in [labels for labels in self.values if labels[position] == value]:
            del self.values[labels]
            self.head.forget(labels)


class Histogram:
    """Buckets for each label set."""

    __slots__ = ("_bounds", "_known", "bounds", "head", "help", "labels", "name", "values")
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self.bounds = tuple(bounds)
        self.values: dict[Labels, list[float]] = {}
        """Counts of each bucket (not cumulative), the last for +Inf, then the sum."""
        self.head = Head(name, help, self.kind, labels)
        self._bounds = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._known: dict[Labels, list[str]] = {}

    def row(self, labels: Labels) -> list[float]:
        """The counts of one label set, for `observe_in`."""
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        return row

    def drop(self, position: int, value: str) -> None:
        """Remove the series whose label at ``position`` is ``value``."""
        for labels in [labels for labels in self.values if labels[position] == value]:
            del self.values[labels]
            self._known.pop(labels, None)

    def observe(self, labels: Labels, value: float) -> None:
        """Count one observation."""
        self.observe_in(self.row(labels), value)

    def observe_in(self, row: list[float], value: float) -> None:
        """Count one observation in a row got before."""
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def pieces(self) -> Iterator[str]:
        """Its text, in pieces."""
        yield self.head.intro
        rows = iter(list(self.values.items()))
        while some := list(islice(rows, LINES // len(self._bounds))):
            yield "".join([self._text(labels, row) for labels, row in some if labels in self.values])

    def _text(self, labels: Labels, row: list[float]) -> str:
        known = self._known.get(labels)
        if known is None:
            names = (*self.labels, "le")
            known = [f"{self.name}_bucket{braced(names, (*labels, bound))} " for bound in self._bounds]
            known += [f"{self.name}{end}{braced(self.labels, labels)} " for end in ("_count", "_sum")]
            self._known[labels] = known
        total, lines = 0.0, []
        for place, count in enumerate(row[:-1]):
            total += count
            lines.append(f"{known[place]}{number(total)}\n")
        lines.append(f"{known[-2]}{number(total)}\n{known[-1]}{number(row[-1])}\n")
        return "".join(lines)


class Gauge:
    """Read when scraped."""

    __slots__ = ("head", "help", "labels", "name", "read")
    kind = "gauge"

    def __init__(
        self, name: str, help: str, read: Callable[[], Iterable[tuple[Labels, float]]], labels: Sequence[str] = ()
    ) -> None:
        self.name, self.help, self.labels, self.read = name, help, tuple(labels), read
        self.head = Head(name, help, self.kind, labels)

    def pieces(self) -> Iterator[str]:
        """Its text, in pieces."""
        yield self.head.intro
        values = list(self.read())
        self.head.keep(2 * len(values) + 64)
        rows = iter(values)
        while some := list(islice(rows, LINES)):
            of = self.head.of
            yield "".join([f"{of(labels)}{number(value)}\n" for labels, value in some])
