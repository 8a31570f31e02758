"""Who may ask what of the control plane: the token, requests of other sites, how large and how slow a body may be.

Whoever is refused is told in JSON, whatever refused it. A wrong token counts against the address that it came from, and a right
one passes whatever came before it: it is an operator's, in need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from gateway.door import Door
from gateway.errors import BadRequest, Fault
from gateway.guesses import Guesses
from gateway.page import static

if TYPE_CHECKING:
    from gateway.run import Running

LARGE, SMALL = 64 * 1024 * 1024, 1024 * 1024
"""Bytes of a body: of a request that is asked about, and of anything else."""
UPLOAD = 60.0
"""Seconds that a body may take."""
DOOR = web.AppKey("door", Door)
BODY = web.RequestKey("body", bytes)
Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """Middlewares; see the module's head."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._guesses = Guesses[None]()

    @web.middleware
    async def timed(self, request: web.Request, handler: Serve) -> web.StreamResponse:
        """Tell the door that something happens."""
        door = request.app[DOOR]
        door.begun(request.protocol)
        try:
            return await handler(request)
        finally:
            door.ended(request.protocol)

    @web.middleware
    async def guard(self, request: web.Request, handler: Serve) -> web.StreamResponse:
        """Refuse who may not, and tell in JSON why."""
        return await self._told(request, handler, self._check)

    @web.middleware
    async def inside(self, request: web.Request, handler: Serve) -> web.StreamResponse:
        """Other processes of this gateway may all, by a socket that nobody else can reach."""
        return await self._told(request, handler, lambda request: None)

    async def _told(
        self, request: web.Request, handler: Serve, check: Callable[[web.Request], None]
    ) -> web.StreamResponse:
        try:
            check(request)
            return await handler(request)
        except Fault as fault:
            response = _refusal(fault.status, fault.message)
            if fault.status in (429, 503):
                response.headers["retry-after"] = str(max(1, round(fault.retry_after or 1)))
            return response
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = _refusal(error.status, error.reason or "refused")
            if "allow" in error.headers:
                response.headers["allow"] = error.headers["allow"]
            return response
        except ConnectionError:
            # The client left; there is nobody to answer.
            raise
        except Exception:
            self.running.gateway.defect("answering on the admin port")
            return _refusal(500, "the gateway failed; its log says why")

    def authorized(self, request: web.Request) -> bool:
        """Whether it brings the token, or none is needed."""
        token = self.running.config.admin.token
        given = request.headers.get("authorization", "")
        return not token or compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {token!s}".encode())

    def _check(self, request: web.Request) -> None:
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        other = origin is not None and _authority(origin) != request.host
        # A link to the page may stand anywhere.
        if other or (site not in (None, "none", "same-origin") and not static(request)):
            raise web.HTTPForbidden(reason="requests of other sites are refused")
        if not self.running.config.admin.token and not _local(request.host):
            # A name that some site lets point to this machine: then its pages are of the same origin.
            raise web.HTTPForbidden(reason="without a token the admin port answers to localhost and to addresses only")
        if request.path not in ("/healthz", "/readyz") and not static(request) and not self.authorized(request):
            self._guessed(request)
            raise web.HTTPUnauthorized(reason="send the admin token as 'Authorization: Bearer TOKEN'")
        browser = origin is not None or site is not None
        if browser and request.can_read_body and request.content_type != "application/json":
            # Of other sites a browser sends forms and text without asking first, but never this.
            raise web.HTTPUnsupportedMediaType(reason="a browser has to send application/json")
        most = LARGE if request.path == "/route" else SMALL
        if (request.content_length or 0) > most:
            raise _too_large(most)

    def _guessed(self, request: web.Request) -> None:
        """The token is wrong, or there is none. Raises `GuessedTooOften`."""
        if "authorization" in request.headers:
            address = request.remote or ""
            self.running.metrics.auth_failures.add(("admin",))
            self._guesses.a_minute = self.running.config.auth.failures_per_minute
            self._guesses.check(address)
            self._guesses.failed(address, b"")


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


async def read(request: web.Request, most: int) -> bytes:
    """The body, of at most so many bytes, however often it is asked for. Raises what `Access.guard` answers."""
    if BODY in request:
        return request[BODY]
    found = bytearray()
    try:
        async with asyncio.timeout(UPLOAD):
            async for piece in request.content.iter_any():
                found += piece
                if len(found) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason="the body did not come in time") from None
    except (ValueError, aiohttp.ClientPayloadError, aiohttp.http_exceptions.HttpProcessingError):
        raise BadRequest("the body cannot be read: it is not framed, or not coded, as it says") from None
    request[BODY] = bytes(found)
    return bytes(found)


def has_body(request: web.Request) -> bool:
    """Whether it brought one."""
    return bool(request[BODY]) if BODY in request else request.can_read_body


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body, a JSON object. Raises what `Access.guard` answers."""
    try:
        body = msgspec.json.decode(await read(request, SMALL))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def in_json(body: Any, status: int = 200) -> web.Response:
    """An answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _too_large(most: int) -> web.HTTPException:
    return web.HTTPRequestEntityTooLarge(most, most, reason=f"the body is over the limit of {most} bytes")


def _refusal(status: int, message: str) -> web.Response:
    response = in_json({"error": {"message": message, "code": status}}, status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response
