"""Mock engines for benchmarks: ``python -m load_tests.bench.mock PORT ...``, all in one process.

They cost as little as Python allows: nothing of a body is read but its length and whether it asks for a stream. They call
themselves vLLM and report what the load generator tells them to in the header ``x-bench-cached`` (cached tokens), so that a
gateway learns what it would learn from a real cache.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

EVENTS = 200
EVENT_SECONDS = 0.005
MODEL = b"mock"
BYTES_PER_TOKEN = 4
METRICS = (
    b'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="65536",engine="0"} 1.0\n'
    b'vllm:num_requests_running{engine="0",model_name="mock"} 0.0\n'
    b'vllm:num_requests_waiting{engine="0",model_name="mock"} 0.0\n'
    b'vllm:kv_cache_usage_perc{engine="0",model_name="mock"} 0.1\n'
)
PAGES = {
    b"/v1/models": b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm","max_model_len":131072}]}',
    b"/version": b'{"version":"0.33.0"}',
    b"/health": b"{}",
    b"/metrics": METRICS,
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a short answer"},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,'
    b'"completion_tokens":4,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"mock","choices":'
    b'[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"mock","choices":[],"usage":'
    b'{"prompt_tokens":%d,"completion_tokens":200,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT_CHUNK = chunk(EVENT)


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pieces: list[bytes] = []
        self.have = 0
        self.need = 0
        """Bytes of head and body; 0 while the head is not complete."""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.have += len(data)
        if not self.need:
            joined = b"".join(self.pieces)
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            self.pieces = [joined]
            self.need = end + 4 + header_number(joined[:end].lower(), b"content-length")
        if self.have >= self.need:
            whole = b"".join(self.pieces)
            self.pieces, self.have, self.need = [], 0, 0
            self.answer(whole)

    def answer(self, request: bytes) -> None:
        """Answer one complete request."""
        end = request.find(b"\r\n\r\n")
        head = request[:end].lower()
        if head.startswith(b"get "):
            page = PAGES.get(request[4 : request.find(b" ", 4)])
            self.transport.write(MISSING if page is None else HEAD % len(page) + page)
            return
        prompt = (len(request) - end - 4) // BYTES_PER_TOKEN
        if request.find(b'"stream":true', end) >= 0:
            self.transport.write(STREAM_HEAD)
            self.begun = self.loop.time()
            self.event(1, prompt)
            return
        cached = min(prompt - 1, header_number(head, b"x-bench-cached"))
        body = ANSWER % (prompt, prompt + 4, cached)
        self.transport.write(HEAD % len(body) + body)

    def event(self, number: int, prompt: int) -> None:
        """The ``number``-th event of a stream; the next on time, however late this one is."""
        if number > EVENTS:
            self.timer = None
            self.transport.write(chunk(LAST % (prompt, prompt + EVENTS)) + b"0\r\n\r\n")
            return
        self.transport.write(EVENT_CHUNK)
        self.timer = self.loop.call_at(self.begun + number * EVENT_SECONDS, self.event, number + 1, prompt)


def header_number(head: bytes, name: bytes) -> int:
    """The value of a header in a head in lower case; 0 without it."""
    at = head.find(b"\r\n" + name + b":")
    if at < 0:
        return 0
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return int(head[start : end if end >= 0 else len(head)])


async def serve(ports: Sequence[int]) -> None:
    """Listen on ``ports`` of loopback for good."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Connection, "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
