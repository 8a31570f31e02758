"""The real tokenizer and chat template of Qwen3.5, and a session whose figures are known to the token.

Neither file is part of this repository: `tests.qwen.fetch` obtains them when the environment is set up. Tests take the
fixture ``qwen`` and are reported as not run where that did not work.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(sys.prefix, "qwen3.5")
"""In the environment, so that what removes that removes them."""


class Files(NamedTuple):
    """Where they lie, as strings: what the gateway's configuration would hold."""

    tokenizer: str
    template: str

    @classmethod
    def at(cls, folder: Path) -> "Files":
        """In that folder, present or not."""
        return cls(str(folder / "tokenizer.json"), str(folder / "chat_template.jinja"))

    @property
    def complete(self) -> bool:
        """Whether both are there."""
        return all(Path(each).is_file() for each in self)


def qwen_files(require: Callable[[str, bool, str], None]) -> Files:
    """The files; skips the test, or fails it where they are required. Most tests just take the fixture ``qwen``."""
    files = Files.at(FOLDER)
    require("qwen", files.complete, f"python -m tests.qwen.fetch {FOLDER}, with a package index in reach")
    return files
