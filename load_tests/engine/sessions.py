"""Sessions that a client opens on SGLang: each request says only what is new, the engine remembers the rest.

A streaming session is append-only with one request at a time; what an aborted request said is not remembered. Both kinds end
with /close_session, or when they were idle for their timeout. (SGLang 0.5.23, srt/session/session_controller.py.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from load_tests.engine.errors import ApiError
from load_tests.engine.template import JSON


class Opened:
    """One session. ``said`` is what its last finished request was, prompt and output."""

    __slots__ = ("last", "running", "said", "streaming", "timeout")

    def __init__(self, streaming: bool, timeout: float | None) -> None:
        self.streaming = streaming
        self.timeout = timeout
        self.said: list[int] = []
        self.running = False
        self.last = time.monotonic()


class OpenSessions:
    """Those of one engine."""

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self._opened: dict[str, Opened] = {}

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, body: JSON) -> str:
        """The new session's id; 400 if there is one of that id."""
        self.reap()
        name = body.get("session_id")
        name = name if isinstance(name, str) and name else uuid4().hex
        if name in self._opened:
            raise ApiError(400, f"session id {name} already exists")
        streaming, timeout = bool(body.get("streaming")), body.get("timeout")
        if streaming and not self._streaming:
            raise ApiError(400, "Streaming sessions are disabled. Please relaunch with --enable-streaming-session.")
        self._opened[name] = Opened(streaming, float(timeout) if isinstance(timeout, int | float) else None)
        return name

    def close(self, name: str) -> None:
        self._opened.pop(name, None)

    def reap(self) -> None:
        """Close those that were idle for too long."""
        now = time.monotonic()
        for name, session in list(self._opened.items()):
            if session.timeout is not None and not session.running and now - session.last > session.timeout:
                del self._opened[name]

    def begin(self, params: Any, new: Sequence[int]) -> tuple[Opened | None, list[int]]:
        """The session that ``session_params`` name and the whole prompt; ``None`` and ``new`` for none. 400 if it may not."""
        if not isinstance(params, dict) or not isinstance(params.get("id"), str):
            return None, list(new)
        self.reap()
        session = self._opened.get(params["id"])
        if session is None:
            raise ApiError(400, f"Invalid request: session id {params['id']} does not exist")
        if session.streaming:
            if session.running:
                raise ApiError(400, "Streaming session already has an active request.")
            for word in ("replace", "drop_previous_output", "offset"):
                if params.get(word):
                    raise ApiError(400, f"Streaming sessions do not support {word}.")
        session.running, session.last = True, time.monotonic()
        return session, [*session.said, *new]

    @staticmethod
    def end(session: Opened, said: Sequence[int] | None) -> None:
        """Its request is over; ``said`` is ``None`` if it was aborted."""
        session.running, session.last = False, time.monotonic()
        if said is not None:
            session.said = list(said)
