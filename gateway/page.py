"""The page of the control plane: a few files that say nothing by themselves, so they need no token; what they show does."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from aiohttp import web

from gateway.errors import NotFound

KINDS = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
FOLDER = "/ui/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing but the page's own files is loaded or run, whatever a name that it shows may contain."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class File(NamedTuple):
    """One of them."""

    body: bytes
    kind: str
    tag: str
    """Of its content, for browsers that have it."""


class Page:
    """All of them, read once."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        for each in files("gateway").joinpath("ui").iterdir():
            kind = KINDS.get(each.name.rpartition(".")[2])
            if kind is not None:
                body = each.read_bytes()
                self.files[each.name] = File(body, kind, blake2b(body, digest_size=8).hexdigest())

    async def index(self, request: web.Request) -> web.Response:
        """The page itself."""
        return self._send(request, self.files["index.html"])

    async def file(self, request: web.Request) -> web.Response:
        """A file of it."""
        found = self.files.get(request.match_info["name"])
        if found is None:
            raise NotFound("the page has no file of that name")
        return self._send(request, found)

    def _send(self, request: web.Request, file: File) -> web.Response:
        headers = {**HEADERS, "etag": f'"{file.tag}"'}
        if any(each.value == file.tag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.kind, charset="utf-8", headers=headers)


def static(request: web.Request) -> bool:
    """Whether it asks for the page or a file of it."""
    return request.method in ("GET", "HEAD") and (request.path == "/" or request.path.startswith(FOLDER))
