"""A toy tokenizer: stateless, invertible, and consistent with prefixes, at about four bytes a token.

Text falls greedily into pieces from left to right, so cutting text where a piece ends and tokenizing again gives the
same pieces: what an engine generated is found again when a client sends it back. A piece is its own id:

    special     0x8000 + n          <|im_start|>, <|im_end|>
    word        1 s aaaaa bbbbb ..  up to six lower-case letters of five bits, s says that a space goes before them
    character   0x800000 + code     one character outside ASCII
    bytes       big-endian ASCII    one to four bytes: capitals, digits, spaces, punctuation

The four ranges do not meet, because a byte of ASCII never has its high bit set. Ids fit 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SPECIALS = ("<|im_start|>", "<|im_end|>")
IM_START, IM_END = 0x8000, 0x8001

_PIECE = re.compile(
    r"<\|im_start\|>|<\|im_end\|>| [a-z]{1,6}|[a-z]{1,6}| [A-Z][a-z]{0,2}|[A-Z][a-z]{0,3}|[A-Z]{1,4}|[0-9]{1,4}"
    r"|[ \t\r\n]{1,4}|[!-/:-@\[-`{-~]{1,4}?(?=<\|im_)|[!-/:-@\[-`{-~]{1,4}|[^\x00-\x7f]|[\x00-\x7f]"
)
_WORD = re.compile(r" ?[a-z]{1,6}")
_WORD_BIT, _SPACE_BIT, _CHARACTER = 1 << 31, 1 << 30, 0x800000
_MEMO_LIMIT = 1 << 17


class _Ids(dict[str, int]):
    """piece -> id, filled on first use; dropped whole at a bound, since every id can be computed again."""

    def __missing__(self, piece: str) -> int:
        if len(self) >= _MEMO_LIMIT:
            self.clear()
        value = self[piece] = _piece_id(piece)
        return value


def _piece_id(piece: str) -> int:
    if piece in SPECIALS:
        return IM_START + SPECIALS.index(piece)
    if _WORD.fullmatch(piece):
        value = _WORD_BIT | (_SPACE_BIT if piece[0] == " " else 0)
        for place, letter in enumerate(piece.lstrip(" ")):
            value |= (ord(letter) - 96) << (25 - 5 * place)
        return value
    if piece > "\x7f":
        return _CHARACTER + ord(piece)
    return int.from_bytes(piece.encode(), "big")


_IDS = _Ids()


def pieces_of(text: str) -> list[str]:
    """The pieces of ``text``, in order; joined they are ``text``."""
    return _PIECE.findall(text)


def tokenize(text: str) -> list[int]:
    """Token ids of ``text``; the markers in SPECIALS are one token each, as in real chat tokenizers."""
    ids = _IDS
    return [ids[piece] for piece in _PIECE.findall(text)]


def piece_of(token: int) -> str:
    """The text of one token; U+FFFD for a number that is no token."""
    if token & _WORD_BIT and token < 1 << 32:
        letters = [(token >> shift) & 31 for shift in range(25, -1, -5)]
        if letters[0] and max(letters) <= 26:
            return (" " if token & _SPACE_BIT else "") + "".join(chr(96 + code) for code in letters if code)
        return "�"
    if IM_START <= token < IM_START + len(SPECIALS):
        return SPECIALS[token - IM_START]
    if _CHARACTER <= token <= _CHARACTER + 0x10FFFF:
        return chr(token - _CHARACTER)
    if 0 <= token < _WORD_BIT:
        raw = token.to_bytes(max(1, (token.bit_length() + 7) // 8), "big")
        if max(raw) < 0x80:
            return raw.decode("ascii")
    return "�"


def detokenize(tokens: Iterable[int]) -> str:
    return "".join(map(piece_of, tokens))


def is_tokens(value: object) -> bool:
    """Whether a JSON value is a non-empty list of token ids, that is, of integers below 2**32."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)
