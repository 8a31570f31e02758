"""Where a configuration comes from: a file, and flags that win over it, at the start and at every reload."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gateway import config as configuration
from gateway.config import Config
from gateway.config_check import check
from gateway.config_reader import ConfigError, Problem, masked

Stat = tuple[int, int, int, int]


class Source:
    """``flags`` changes what the file says."""

    def __init__(self, path: str, flags: Callable[[Config], None] = lambda config: None) -> None:
        self.path = path
        self.text: bytes | None = None
        """What the file said when it was last read."""
        self.stat: Stat | None = None
        """What it was then."""
        self.filled: dict[str, str] = {}
        """What variables held that it reads."""
        self._flags = flags

    def load(self) -> Config:
        """Read it. Raises `ConfigError` with all that is wrong."""
        self.stat = stat_of(self.path)
        try:
            self.text = Path(self.path).read_bytes()
            text = self.text.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([Problem(None, "", f"{self.path} cannot be read: {error}")]) from None
        self.filled.clear()
        config = configuration.parse(text, source=self.path, filled=self.filled)
        self._flags(config)
        problems = check(config)
        if problems:
            raise ConfigError(masked(problems, self.filled))
        return config


def stat_of(path: str) -> Stat | None:
    """By what a change of a file is seen; ``None`` where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
