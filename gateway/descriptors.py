"""Whether the process has a file descriptor left.

The event loop takes a connection for which there is none and closes it at once, without a word to anybody: so that it does not
spin. Its client sees a cut connection, and nothing here would ever tell why.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from math import inf

log = logging.getLogger("warmroute")

AGAIN = 60.0
"""Seconds after which it is said again."""


class Descriptors:
    """``short`` is told of each look that found none."""

    def __init__(self, short: Callable[[], None]) -> None:
        self.short = short
        self._said = -inf

    def look(self, now: float) -> None:
        """Twice a second: take one, and give it back."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.short()
            if now - self._said >= AGAIN:
                self._said = now
                log.error(
                    "no file descriptor is left: new connections are cut; raise ulimit -n, or lower listen.max_connections"
                )
