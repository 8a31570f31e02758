"""What any process tells Prometheus of itself, by the names that everybody uses: CPU, memory, descriptors, start."""

from collections.abc import Iterator

from prometheus_client import ProcessCollector

from gateway.exposition import Head, number

_COLLECTOR = ProcessCollector(registry=None)
"""Reads ``/proc``; elsewhere it tells nothing."""


def of_process() -> Iterator[str]:
    """``process_*``, as text."""
    for family in _COLLECTOR.collect():
        for sample in family.samples:
            yield f"{Head(sample.name, family.documentation, family.type, ()).intro}{sample.name} {number(sample.value)}\n"
