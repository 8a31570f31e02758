"""The reference of all metrics, from what defines them: ``python -m gateway.reference README.md`` brings that part of a file up
to date which stands between its two marks."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.config import JWT, Auth, Config
from gateway.process import of_process
from gateway.run import Running
from gateway.seat import Seat
from gateway.series import Counter, Gauge, Histogram

BEGIN, END = "<!-- metrics: written by `python -m gateway.reference` -->", "<!-- end of metrics -->"
NOW = "Read at the scrape"


async def reference() -> str:
    """Tables of every metric that a gateway can tell."""
    jwt = JWT(issuer="https://issuer.example", audience=["warmroute"], jwks="https://issuer.example/keys")
    with TemporaryDirectory() as folder:
        # One of several tells most.
        seat = Seat(0, 1, folder, "", "", {}, -1, -1)
        metrics = Running(Config(auth=Auth(jwt=jwt)), seat=seat).metrics
    parts = [_table(about, group) for about, group in metrics.groups.items()]
    parts.append(_table(NOW, metrics.gauges))
    names = sorted(
        {line.split()[2] for piece in of_process() for line in piece.splitlines() if line.startswith("# TYPE")}
    )
    parts.append("### The process\n\n" + ", ".join(f"`{name}`" for name in names) + ": prometheus-client's.\n")
    return "\n".join(parts)


def _table(about: str, group: Iterable[Counter | Histogram | Gauge]) -> str:
    lines = [f"### {about}", "", "| metric | kind | labels | what it tells |", "| --- | --- | --- | --- |"]
    for each in group:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        told = each.help.replace("|", "\\|")
        lines.append(f"| `{each.head.name}` | {each.kind} | {labels} | {told} |")
    return "\n".join(lines) + "\n"


def updated(text: str, tables: str) -> str:
    """``text`` with ``tables`` between its marks. Raises `ValueError` if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} with {END} after it")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main(path: str) -> None:
    """Bring the file at ``path`` up to date."""
    file = Path(path)
    file.write_text(updated(file.read_text(), asyncio.run(reference())))


if __name__ == "__main__":
    main(sys.argv[1])
