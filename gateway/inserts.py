"""What the gateway puts into requests and answers that pass through it."""

from __future__ import annotations

from hashlib import blake2b
from os import urandom
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_128_digest

from gateway.asks import Ask
from gateway.dialects import Reading
from gateway.dialects.fields import append, splice
from gateway.errors import BadRequest
from gateway.exchange import Exchange
from gateway.hints import able
from gateway.http.incoming import is_json
from gateway.opened import Opened
from gateway.workers import Target

if TYPE_CHECKING:
    from gateway.app import Gateway

SALTED = frozenset(("vllm", "sglang", "tensorrt_llm"))
"""Engines that keep caches of different ``cache_salt`` apart."""
USAGE = b',"stream_options":{"include_usage":true}}'


class Inserts:
    """See the module's head. ``key``: what isolated tenants' cache salts are made with; random if not given.

    ``secure``: clients connect by TLS.
    """

    def __init__(self, gateway: Gateway, key: str | None = None, secure: bool = False) -> None:
        self.gateway = gateway
        self._secure = b"; Secure" if secure else b""
        self._secret = blake2b(key.encode() if key else urandom(32)).digest()

    def body_for(self, exchange: Exchange, target: Target) -> bytes:
        """The body to send: the client's bytes, but for what must be cut out or rewritten."""
        gateway = self.gateway
        reading, model = exchange.reading, exchange.ask.model
        body = exchange.body
        renamed = model is not None and reading.model is not None and reading.model != model.name
        salted = exchange.ask.tenant.isolated and exchange.route.generates and not reading.opaque
        if gateway.recorder is not None and not exchange.counted:
            gateway.recorder.sending(exchange)
        counted = exchange.metered is not None or exchange.queued is not None
        wanted = counted or exchange.ask.predicted is not None or exchange.noted is not None
        exchange.injected = reading.untold and wanted and target.worker.facts.injects_usage
        if exchange.injected:
            # Without usage a stream tells nothing of its cache. It has no such member yet, and ends with a brace.
            body = body.rstrip()[:-1] + USAGE
        if isinstance(reading.opened, Opened):
            body = _turn_of(body, reading, reading.opened, exchange.request_name)
        fetches = bool(exchange.ask.request.fetched) and target.id in exchange.ask.request.fetched
        members: dict[str, bytes] = {}
        if exchange.ask.session is not None and exchange.route.generates and gateway.lifecycle is not None:
            facts = target.worker.facts
            first = None if exchange.choice is None else exchange.choice.prefill
            if facts.refers or target.slots is not None or first is not None or able(target.worker):
                assert first is None or isinstance(first, Target)
                members = gateway.lifecycle.members(exchange.ask, target, first)
        if not (renamed or reading.guarded or salted or fetches):
            if not members:
                return body
            if not reading.labelled:
                return append(body, b",".join([b'"%b":%b' % (name.encode(), value) for name, value in members.items()]))
        if reading.opaque and model is not None and not is_json(exchange.incoming):
            raise BadRequest(
                f"the alias {reading.model!r} cannot be used here: name the model {model.name!r}", param="model"
            )
        add = {"model": msgspec.json.encode(model.name)} if renamed and model is not None else {}
        add |= members
        if fetches and exchange.route.generates and exchange.choice is not None and exchange.choice.prefill is None:
            source = gateway.pairs.source(exchange)
            if source is not None:
                add["kv_transfer_params"] = source
        if salted and target.worker.facts.engine in SALTED:
            add["cache_salt"] = msgspec.json.encode(self.salt(exchange.ask))
        return splice(body, reading.guarded, add)

    def lines(self, exchange: Exchange, target: Target) -> bytes:
        """Header lines of this request alone."""
        label = self.label_of(exchange, target) if self.gateway.labels else b""
        return label if exchange.trace is None else label + exchange.trace.line

    def label_of(self, exchange: Exchange, target: Target) -> bytes:
        """The header line by which vLLM labels its KV events; none where the client sends one, or a ``session_id``."""
        session = exchange.ask.session
        told = exchange.reading.labelled or b"x-session-id" in exchange.incoming.named
        if session is None or told or target.worker.facts.engine != "vllm":
            return b""
        return b"x-session-id: %b\r\n" % session.key.hex().encode()

    def salt(self, ask: Ask) -> str:
        """What keeps an isolated tenant's cache apart in the engine; made with the client's own salt, and tells nothing."""
        told = ask.tenant.name.encode() + b"\x00" + ask.reading.namespace
        return blake2b(told, key=self._secret, digest_size=16).hexdigest()

    def told(self, exchange: Exchange) -> bytes:
        """Response header lines that say where and why, if the tenant may see them."""
        ask, target, choice = exchange.ask, exchange.target, exchange.choice
        if target is None or choice is None:
            return b""
        token = self._token(exchange, target) if self.gateway.tokens else b""
        if exchange.reading.canonical:
            token += b"x-warmroute-canonical: %b\r\n" % ",".join(exchange.reading.canonical).encode()
        if not ask.tenant.shows_routing:
            return token
        parts = [b"x-warmroute-worker: ", target.name.encode(), b"\r\nx-warmroute-decision: "]
        parts += (ask.policy.name.encode(), b"/", choice.reason.encode(), b"\r\n")
        if choice.prefill is not None:
            parts += (b"x-warmroute-prefill-worker: ", choice.prefill.name.encode(), b"\r\n")
        if ask.found is not None:
            parts += (b"x-warmroute-session-source: ", ask.found.encode(), b"\r\n")
        if ask.predicted is not None:
            parts.append(b"x-warmroute-predicted-cached-tokens: %d\r\n" % ask.predicted)
        parts.append(token)
        return b"".join(parts)

    def _token(self, exchange: Exchange, target: Target) -> bytes:
        """Header lines with a token, for a client that names no session by itself."""
        gateway = self.gateway
        ask = exchange.ask
        session = ask.session
        if session is None:
            if not (ask.policy.needs_session and exchange.route.generates) or exchange.reading.opaque:
                return b""
            # Nothing is kept of it unless it comes back.
            key = xxh3_128_digest(exchange.request_id, ask.request.draw)
            token = gateway.sessions.sticky.seal(ask.tenant.seed, key, target.seed)
        elif ask.found in ("content", "sticky"):
            home = None if session.home is None else gateway.fleet.targets.get(session.home)
            token = gateway.sessions.token(session, ask.tenant.seed, 0 if home is None else home.seed)
        else:
            return b""
        if not gateway.sessions.naming.cookie:
            return b"x-warmroute-session: %b\r\n" % token
        cookie = b"set-cookie: x-warmroute-session=%b; Path=/; HttpOnly; SameSite=Lax" + self._secure + b"\r\n"
        return b"x-warmroute-session: %b\r\n" % token + cookie % token


def _turn_of(body: bytes, reading: Reading, opened: Opened, name: str) -> bytes:
    """The body of a turn of an engine's session, as its engine calls it. ``name``: by which the turn can be aborted, where its
    client gave it none."""
    params = msgspec.json.decode(body, type=_Turn).session_params
    params["id"] = msgspec.Raw(msgspec.json.encode(opened.alias))
    add = {"session_params": msgspec.json.encode(params)}
    if not reading.named:
        add["rid"] = msgspec.json.encode(name)
    return splice(body, (), add)


class _Turn(msgspec.Struct):
    session_params: dict[str, msgspec.Raw]
