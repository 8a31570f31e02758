"""Token mode: a request's prompt as the very token ids that its engine will see.

Rendering and tokenising take milliseconds, so they run in a small pool, once for equal bodies, and never for those that
failed a moment ago. What is tokenised is only what is new: a tokenizer splits text at its special tokens before anything
else, so what stands between two of them has the same ids wherever it stands, and is kept by its digest. When the pool is
full, late, or the prompt cannot be told, that request is routed by text, and counted.

Needs the extra ``warmroute[tokens]``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from tokenizers import Tokenizer as Fast
from xxhash import xxh3_128_digest

from gateway.preparing import Pool, Unrendered, object_in
from gateway.templates import Template

log = logging.getLogger("warmroute")

KEPT = 128 * 1024 * 1024
"""Bytes of ids that are kept, about, for each tokenizer."""
TRIALS = (
    "<|a|>Hello  world\n\n  it's 3.14 \t end ",
    '{"a": [1, 2, {"b": null}]}\r\nif x:\n        return \'\u4f60\u597d\' \U0001f600 ',
    " leading, trailing ",
    "plain ",
    "你好",
)


class Tokenizer:
    """A Hugging Face ``tokenizer.json``, exact and incremental. Safe for use by several threads."""

    def __init__(self, path: str, kept: int = KEPT) -> None:
        try:
            self._fast = Fast.from_file(path)
        except Exception as error:
            raise ValueError(f"{path} is no tokenizer: {error}") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.kept = kept
        self.size = 0
        """Bytes of ids kept, about."""
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()
        added = self._fast.get_added_tokens_decoder().values()
        plain = [each for each in added if not (each.normalized or each.lstrip or each.rstrip or each.single_word)]
        self._special = {each.content: self._fast.token_to_id(each.content) for each in plain}
        words = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(words) + ")").split if words else None
        self._ends = self._around()
        if len(plain) < len(list(added)) or (self._split is not None and not self._is_exact()):
            log.warning("%s does not split text at its special tokens: whole prompts are tokenised each time", path)
            self._split = None

    def ids(self, text: str, special: bool = False) -> bytes:
        """Token ids of ``text``, little-endian u32 each. ``special``: with what stands around a prompt that is plain text."""
        if special and self._ends is None:
            return self._encode(text, True)
        if self._split is None:
            found = self._piece(text)
        else:
            found = b"".join([self._piece(piece) for piece in self._split(text) if piece])
        return found.join(self._ends) if special and self._ends is not None else found

    def _piece(self, text: str) -> bytes:
        id_ = self._special.get(text)
        if id_ is not None and self._split is not None:
            return id_.to_bytes(4, "little")
        key = xxh3_128_digest(text.encode("utf-8", "replace"))
        known = self._known.get(key)
        if known is not None:
            try:
                self._known.move_to_end(key)
            except KeyError:
                # Another thread made room meanwhile.
                pass
            return known
        found = self._encode(text)
        with self._lock:
            if key not in self._known:
                self._known[key] = found
                self.size += len(found) + 160
                while self.size > self.kept and self._known:
                    self.size -= len(self._known.popitem(last=False)[1]) + 160
        return found

    def _encode(self, text: str, special: bool = False) -> bytes:
        try:
            ids = array("I", self._fast.encode(text, add_special_tokens=special).ids)
        except (TypeError, UnicodeEncodeError):
            # Half a surrogate pair.
            raise Unrendered("text") from None
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def _around(self) -> tuple[bytes, bytes] | None:
        """What stands in front of a plain text and behind it; ``None`` if that cannot be told apart."""
        if not self._fast.num_special_tokens_to_add(False):
            return b"", b""
        bare, whole = self._encode("a"), self._encode("a", True)
        # To the token: the same bytes may lie across two.
        found = [at for at in range(0, len(whole), 4) if bare and whole.startswith(bare, at)]
        return (whole[: found[0]], whole[found[0] + len(bare) :]) if len(found) == 1 else None

    def _is_exact(self) -> bool:
        """Whether pieces have the ids that they have in the whole: some tokenizers mark where a text begins."""
        words = list(self._special)[:4]
        text = "".join([word + trial for word in words for trial in TRIALS]) + "".join(TRIALS)
        return self.ids(text) == self._encode(text)


class TokenMode:
    """Token ids of one model's prompts. Bound to the running event loop."""

    def __init__(self, name: str, tokenizer: Tokenizer, template: Template | None, pool: Pool) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.pool = pool

    def start(self, kind: str, body: bytes) -> bytes | asyncio.Future[bytes] | None:
        """The ids of a request of that kind, at once or in a while; ``None`` for a kind that has none.

        Raises `Unrendered`; so does the future.
        """
        read = _READERS.get(kind)
        if read is None:
            return None
        return self.pool.start(xxh3_128_digest(body) + self.name.encode(), len(body), lambda: read(self, body))

    def of_chat(self, body: bytes) -> bytes:
        """Raises `Unrendered`."""
        if self.template is None:
            raise Unrendered("no_template")
        return self.tokenizer.ids(self.template.render(object_in(body)))

    def of_text(self, body: bytes) -> bytes:
        """Raises `Unrendered`."""
        told = object_in(body)
        text = told.get("prompt", told.get("text"))
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not isinstance(text, str):
            raise Unrendered("prompt")
        return self.tokenizer.ids(text, special=told.get("add_special_tokens") is not False)


_READERS: dict[str, Callable[[TokenMode, bytes], bytes]] = {
    "chat": TokenMode.of_chat,
    "completions": TokenMode.of_text,
    "generate": TokenMode.of_text,
}
