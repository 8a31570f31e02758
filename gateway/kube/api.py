"""One request to an API server: a page of a list, or the lines of a watch. Every failure is a `Lost` that names its cure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import aiohttp
import msgspec

from gateway.discovery.base import Lost
from gateway.kube.access import Access

CONNECT = 5.0
ANSWER = 30.0
"""Seconds that a page of a list may take."""
LARGEST = 64 * 1024 * 1024
"""Bytes of a page."""
LONGEST = 4 * 1024 * 1024
"""Bytes of a line: one object, which the API server bounds to less."""
MOST_AGAIN = 120.0
"""Seconds of a server's wish to be left alone that are granted."""
RULES = "deploy/kubernetes/role.yaml has the rules"


class Expired(Lost):
    """The version from which was asked is not kept any more: only a new list helps."""


@dataclass(frozen=True, slots=True)
class Collection:
    """What is listed and watched."""

    group: str
    """``v1``, or group/version."""
    resource: str
    namespace: str | None
    """``None``: all."""
    labels: str | None = None
    fields: str | None = None

    @property
    def path(self) -> str:
        """Its place at the API server."""
        root = f"/api/{self.group}" if self.group == "v1" else f"/apis/{self.group}"
        return f"{root}/namespaces/{self.namespace}/{self.resource}" if self.namespace else f"{root}/{self.resource}"

    @property
    def query(self) -> dict[str, str]:
        """What narrows it."""
        told = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in told.items() if value}

    def __str__(self) -> str:
        return f"{self.resource} in namespace {self.namespace}" if self.namespace else f"{self.resource} of the cluster"


class _Status(msgspec.Struct):
    message: str | None = None


class Api:
    """An API server. ``async with`` it."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def page(self, collection: Collection, query: dict[str, str]) -> bytes:
        """One page of a list. Raises `Lost`; `Expired` if the page before it is forgotten."""
        async with self._ask(collection, "list", query, ANSWER) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > LARGEST:
                    raise Lost("malformed", f"a page of {collection} has more than {LARGEST} bytes")
            return bytes(body)

    async def watch(self, collection: Collection, version: str, seconds: float, grace: float) -> AsyncIterator[bytes]:
        """Lines of a watch from ``version`` on, an empty one first: it is let in. The server is asked to end it after
        ``seconds``; where it does not within ``grace``, nobody may be there. Raises `Lost`, `Expired`."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        async with self._ask(collection, "watch", query, max(1.0, seconds) + grace) as response:
            yield b""
            rest = b""
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line
                if len(rest) > LONGEST:
                    raise Lost("malformed", f"an event of {collection} has more than {LONGEST} bytes")

    @asynccontextmanager
    async def _ask(
        self, collection: Collection, verb: str, query: dict[str, str], seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        token, tls = self.access.token(), self.access.tls()
        try:
            async with self._session.get(
                self.access.url + collection.path,
                params=collection.query | query,
                headers={"accept": "application/json", **({"authorization": f"Bearer {token}"} if token else {})},
                ssl=tls if tls is not None else True,
                server_hostname=self.access.server_name if tls is not None else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, connect=CONNECT),
            ) as response:
                if response.status != 200:
                    await _refused(response, collection, verb)
                yield response
        except aiohttp.ConnectionTimeoutError:
            raise Lost("unreachable", f"{self.access.url} takes no connection") from None
        except TimeoutError:
            told = "a watch of" if verb == "watch" else "a list of"
            raise Lost("silent", f"{told} {collection} told nothing and did not end in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Lost(
                "unreachable", f"{self.access.url} could not be asked for {collection}: {_brief(error)}"
            ) from None


async def _refused(response: aiohttp.ClientResponse, collection: Collection, verb: str) -> NoReturn:
    """Raises what a status other than 200 means."""
    try:
        body = await response.content.read(65536)
        said = msgspec.json.decode(body, type=_Status).message or ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = ""
    status, again = response.status, _again(response.headers.get("retry-after"))
    if status == 410:
        raise Expired("expired", f"the version of {collection} is not kept any more")
    if status == 401:
        raise Lost("unauthorized", "the API server does not take the token or certificate: has it expired?")
    if status == 403:
        raise Lost(
            "forbidden", f"may not {verb} {collection}: grant the verb {verb!r} on {collection.resource}; {RULES}"
        )
    if status == 404:
        raise Lost(
            "not_found", f"there are no {collection.resource} of {collection.group}: is its definition installed?"
        )
    if status == 429:
        raise Lost("throttled", f"the API server is too busy to {verb} {collection}", again)
    reason = "server_error" if status >= 500 else "malformed"
    raise Lost(reason, f"the API server answers {status} to {verb} {collection}: {said[:200] or 'no reason'}", again)


def _again(told: str | None) -> float | None:
    return min(MOST_AGAIN, float(told)) if told is not None and told.isascii() and told.isdigit() else None


def _brief(error: Exception) -> Any:
    return str(error)[:200] or type(error).__name__
