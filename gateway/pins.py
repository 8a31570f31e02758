"""Which worker alone has some state: stored responses and conversations."""

from collections import OrderedDict

MOST = 50_000
"""Names that are remembered of one tenant: the longest unused goes."""


class Pins:
    """By tenant, so that none can crowd out another's."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[str, tuple[str, bytes | None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, tenant: str, name: str, worker: str, session: bytes | None) -> None:
        """``worker`` has what goes by ``name``; ``session``: the key of the session that it belongs to."""
        names = self._of.setdefault(tenant, OrderedDict())
        names[name] = (worker, session)
        names.move_to_end(name)
        if len(names) > self._most:
            names.popitem(last=False)

    def find(self, tenant: str, name: str) -> tuple[str | None, bytes | None]:
        """(worker id, key of its session); ``None`` each for what is not known."""
        names = self._of.get(tenant)
        found = None if names is None else names.get(name)
        if names is None or found is None:
            return None, None
        names.move_to_end(name)
        return found

    def others(self, tenant: str, name: str) -> bool:
        """Whether it is another tenant's, and not this one's too."""
        found = [each for each, names in self._of.items() if name in names]
        return bool(found) and tenant not in found

    def names(self) -> list[str]:
        """All of them."""
        return [name for names in self._of.values() for name in names]
