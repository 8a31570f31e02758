"""The canonical prompt: what a body makes an engine see, in the order in which chat templates render it.

Text mode: bytes. Dialects build it from their own messages; here is what they share.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Raw
from xxhash import xxh3_128_digest

MARKS = 64
"""How many message ends before the last are told: a turn adds an answer, and for each tool two messages more."""


class Thinking(StrEnum):
    """What a chat template does with the thinking in earlier answers."""

    STRIP = "strip_before_last_user"
    """It stays only behind the last user message."""
    KEEP = "keep"
    DROP = "drop"
    """None of it is ever shown."""

    def shown_from(self, last_user: int, count: int) -> int:
        """The first of ``count`` messages whose thinking is shown; ``last_user``: where the user spoke last."""
        return 0 if self is Thinking.KEEP else count if self is Thinking.DROP else last_user


FAMILIES = (
    (r"deepseek-?r1|deepseek-?v3|nemotron", Thinking.DROP),
    (r"minimax-?m[2-9]|kimi-?k2-?thinking|kimi-?k[3-9]", Thinking.KEEP),
)
"""Names of model families and what their templates do; all others strip, as Qwen's and most do."""


def thinking_of(model: str) -> Thinking:
    """What the template of ``model`` does with thinking, as far as its name tells."""
    for pattern, thinking in FAMILIES:
        if re.search(pattern, model, re.IGNORECASE):
            return thinking
    return Thinking.STRIP


class Prompt:
    """The canonical prompt, in the order in which a chat template renders it.

    ``parts`` are the pieces that ``text`` is joined from; each of ``ends`` is how many of them stand before the end of a
    message, and the last message ends the prompt. Leading system messages are no ends: they are shared, not said.
    ``asks``: the last message is a user's, so that what is said up to here stays as it is when thinking is dropped. ``lead``:
    bytes before all parts, and how many parts, stand before the first message that is not the system's.
    """

    __slots__ = ("_ends", "_lead", "_parts", "asks", "messages", "text")

    def __init__(
        self,
        parts: Sequence[bytes | Raw | str],
        ends: Sequence[int],
        text: bytes | None = None,
        asks: bool = False,
        messages: int | None = None,
        lead: tuple[int, int] = (0, 0),
    ) -> None:
        self.text = b"".join(parts) if text is None else text  # type: ignore[arg-type]
        self.asks = asks
        self.messages = len(ends) if messages is None else messages
        """How many messages it has, those of the system included."""
        self._parts = parts
        self._ends = ends
        self._lead = lead

    @property
    def lead(self) -> int:
        """Bytes of ``text`` before the first message that is not the system's: what sessions may share."""
        size, parts = self._lead
        return size + sum([_size(part) for part in self._parts[:parts]])

    @property
    def says(self) -> bool:
        """Whether anybody but the system said anything."""
        return bool(self._ends)

    def earlier_ends(self) -> Iterator[int]:
        """Offsets in ``text`` at which the `MARKS` messages before the last end, the latest first.

        ``text`` up to there does not depend on what follows it, as long as no thinking is dropped before it.
        """
        ends = self._ends
        if len(ends) < 2:
            return
        offset, end = len(self.text), ends[-1]
        for start in ends[-2 : -MARKS - 2 : -1]:
            offset -= sum([_size(part) for part in self._parts[start:end]])
            end = start
            yield offset


def _size(part: bytes | Raw | str) -> int:
    if isinstance(part, str):
        return len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
    return len(memoryview(part))


def digest(raw: Raw | bytes) -> bytes:
    """What stands in a prompt for content that is not text: its digest, so that equal content is equal."""
    return b"\x00\x05" + xxh3_128_digest(memoryview(raw))


def encode(text: str) -> bytes:
    """UTF-8; lone surrogates survive, for a prompt must have bytes whatever the client sent."""
    return text.encode("utf-8", "surrogatepass")
