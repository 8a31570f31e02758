"""A prompt in pieces, in the order in which chat templates render them: parameters, tools, system prompt, messages."""

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple


def weight(text: str) -> int:
    """Bytes of it; lone surrogates are three each."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Part(StrEnum):
    """What of a prompt a piece is."""

    PARAMETER = "parameter"
    TOOL = "tool"
    SYSTEM = "system"
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"
    RESULT = "result"
    MEDIA = "media"


_WHAT = {
    Part.TEXT: "text",
    Part.THINKING: "thinking",
    Part.CALL: "tool call",
    Part.RESULT: "tool result",
    Part.MEDIA: "media",
}


class Piece(NamedTuple):
    """One piece of a message."""

    part: Part
    text: str


class Message(NamedTuple):
    """One message; ``pieces`` in the order in which they are rendered."""

    role: str
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """What it says without its thinking."""
        return self.role, tuple([piece.text for piece in self.pieces if piece.part is not Part.THINKING])

    @property
    def weight(self) -> int:
        """Bytes without its thinking."""
        return sum([weight(piece.text) for piece in self.pieces if piece.part is not Part.THINKING])


class Tool(NamedTuple):
    """One tool: ``text`` is ``value`` as compact JSON, its keys in the order in which they came."""

    name: str
    text: str
    value: Any


class Outline:
    """A prompt in pieces."""

    def __init__(
        self,
        *,
        parameters: dict[str, str] | None = None,
        tools: Sequence[Tool] = (),
        system: Sequence[str] = (),
        messages: Sequence[Message] = (),
        shown: int = 0,
        first: int = 0,
        where: str = "messages",
        text: str | None = None,
    ) -> None:
        self.parameters = parameters or {}
        """Name -> JSON with sorted keys, for templates are given the values."""
        self.tools = tuple(tools)
        self.system = tuple(system)
        """Texts of the leading system messages, or blocks."""
        self.messages = tuple(messages)
        """Those behind the system's."""
        self.shown = shown
        """The first of ``messages`` whose thinking the template shows."""
        self.first = first
        """What index ``messages[0]`` has in the body's list."""
        self.where = where
        """What that list is called."""
        self.text = text
        """The prompt itself, where it is given as text and has no pieces."""

    @cached_property
    def size(self) -> int:
        """Bytes of what is rendered."""
        if self.text is not None:
            return weight(self.text)
        return self.head + sum([self.rendered(at) for at in range(len(self.messages))])

    @cached_property
    def head(self) -> int:
        """Bytes before the messages: what sessions of one application share."""
        if self.text is not None:
            return 0
        return sum([weight(tool.text) for tool in self.tools]) + sum([weight(text) for text in self.system])

    def rendered(self, at: int) -> int:
        """Bytes of one message."""
        return sum([weight(piece.text) for piece in self.shows(at)])

    def shows(self, at: int) -> Sequence[Piece]:
        """The pieces of one message that the template renders."""
        pieces = self.messages[at].pieces
        if at >= self.shown:
            return pieces
        return [piece for piece in pieces if piece.part is not Part.THINKING]


class Place(NamedTuple):
    """Where in a prompt."""

    part: Part
    name: str = ""
    """Of the parameter or the tool; the role of the message."""
    number: int | None = None
    """Of the tool, of the system's text if there are several, or of the message in the body's list."""
    offset: int | None = None
    """Characters into the part."""
    where: str = ""
    """What the body's list is called."""

    def __str__(self) -> str:
        at = "" if self.offset is None else f"character {self.offset} of "
        if self.part is Part.PARAMETER:
            return f"the parameter {self.name}"
        if self.part is Part.TOOL and not self.name and self.number is None:
            return "the list of tools"
        if self.part is Part.TOOL:
            tool = f"the tool {self.name}" if self.number is None else f"tools[{self.number}] ({self.name})"
            return at + tool
        if self.part is Part.SYSTEM:
            return at + ("the system prompt" if self.number is None else f"part {self.number} of the system prompt")
        what = _WHAT[self.part]
        if self.number is not None:
            return f"{at}the {what} of {self.where}[{self.number}] ({self.name})"
        return f"{at}the {what} of an earlier message ({self.name})" if self.name else f"{at}the prompt"
