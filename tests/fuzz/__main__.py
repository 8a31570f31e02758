"""One target, guided by coverage: see ``--help``. Ends with status 0 if nothing was found."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gateway", "kv_index"], enable_loader_override=False):
    from tests.fuzz.targets import Target, all_targets

    TARGETS = all_targets()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, help="how long")
    parser.add_argument("--runs", type=int, default=-1, help="how many inputs")
    parser.add_argument(
        "--seed", type=int, default=0, help="the same one tries the same inputs; 0: another one each time"
    )
    parser.add_argument("--longest", type=int, default=2048, help="bytes of an input")
    told = parser.parse_args()
    target = TARGETS[told.target]
    with tempfile.TemporaryDirectory() as folder:
        corpus, words = _files(Path(folder), target)
        options = [f"-runs={told.runs}", f"-seed={told.seed}", f"-dict={words}", f"-max_len={told.longest}"]
        options += ["-timeout=20", "-artifact_prefix=fuzz-", "-verbosity=1", "-len_control=20"]
        if told.seconds:
            options.append(f"-max_total_time={told.seconds}")
        atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
        atheris.Fuzz()


def _files(folder: Path, target: Target) -> tuple[Path, Path]:
    """The seeds, and the words in libFuzzer's form."""
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    lines = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words if word]
    words.write_text("".join(f'"{line}"\n' for line in lines))
    return corpus, words


if __name__ == "__main__":
    main()
