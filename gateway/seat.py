"""What one of several gateway processes of a host is given by the process that started it (`gateway.supervisor`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

VARIABLE = "WARMROUTE_SEAT"


class Seat(msgspec.Struct):
    """One process's place among several. Descriptors are open in it."""

    number: int
    """From 0."""
    processes: int
    """How many there are."""
    folder: str
    """Of Unix sockets, by which they know each other; nobody else may look into it."""
    host: str
    """Hex digits: what they have in common."""
    secret: str
    """Hex digits: what tokens and salts are made with, where the configuration says nothing."""
    sockets: dict[str, int]
    """Name of an address of the configuration (``listen``, ``admin``, ...) -> the descriptor of its listening socket."""
    status: int
    """A pipe by which the process says that it lives."""
    life: int
    """A pipe that ends when the one that started it does."""

    def socket(self, name: str) -> socket.socket | None:
        """The listening socket of an address."""
        descriptor = self.sockets.get(name)
        return None if descriptor is None else socket.socket(fileno=os.dup(descriptor))

    def own(self, path: str) -> str:
        """A file of this process's own, beside ``path``."""
        stem, dot, end = path.rpartition(".")
        if not dot or "/" in end:
            return f"{path}-{self.number}"
        return f"{stem}-{self.number}.{end}"


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The seat of this process; ``None``: it is the only one."""
    told = environment.get(VARIABLE)
    return None if told is None else msgspec.json.decode(told, type=Seat)
