"""Answers of the gateway's own on the clients' port: health, models, and the ends of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_to_bytes

import msgspec

from gateway.errors import NotFound, WrongMethod
from gateway.http import wire
from gateway.http.incoming import Incoming, shown
from gateway.listing import models, models_body
from gateway.naming import Found, clean
from gateway.pressure import Rung
from gateway.sessions import Session, keys_of
from gateway.tenants import Tenant

if TYPE_CHECKING:
    from gateway.app import Gateway

MODELS = b"/v1/models"
SESSIONS = b"/v1/sessions/"


class Own:
    """See the module's head. Each takes a request and gives a whole response. Raises `Fault`."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def healthz(self, incoming: Incoming) -> bytes:
        return wire.whole(200, b'{"status":"ok"}', incoming)

    def readyz(self, incoming: Incoming) -> bytes:
        ready, body = self.readiness()
        return wire.whole(200 if ready else 503, msgspec.json.encode(body), incoming)

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether every configured model has a ready worker (any worker, if no model is configured)."""
        gateway = self.gateway
        configured = sorted(gateway.options.configured)
        lacking = [name for name in configured if gateway.fleet.view(name) is None]
        refuses = gateway.pressure.rung is Rung.ALL
        ready = not gateway.ending and not refuses and not lacking and gateway.fleet.view(None) is not None
        reason = (
            "shutting down"
            if gateway.ending
            else "under pressure"
            if refuses
            else "no ready worker"
            if not lacking
            else "models without a ready worker"
        )
        return ready, {"ready": ready, **({} if ready else {"reason": reason, "models": lacking})}

    def models(self, incoming: Incoming) -> bytes:
        gateway = self.gateway
        if incoming.method not in (b"GET", b"HEAD"):
            raise WrongMethod("/v1/models", "GET, HEAD")
        tenant = gateway.tenants.of(incoming.named, incoming.memo, incoming.peer)
        entries = models(gateway.fleet, gateway.options, tenant)
        if incoming.path == MODELS:
            return wire.whole(200, models_body(entries), incoming)
        name = unquote(incoming.path[len(MODELS) + 1 :])
        if name not in entries:
            raise NotFound(f"the model {name!r} does not exist here", param="model")
        return wire.whole(200, msgspec.json.encode(entries[name]), incoming)

    def end_session(self, incoming: Incoming) -> bytes:
        """Its owner ends a session, by the name that its requests gave it, by its token or by its id."""
        if incoming.method != b"DELETE":
            raise WrongMethod(shown(incoming.path), "DELETE")
        tenant = self.gateway.tenants.of(incoming.named, incoming.memo, incoming.peer)
        told = unquote_to_bytes(incoming.path[len(SESSIONS) :])
        found = self._sessions_called(told, tenant)
        if not found:
            raise NotFound(f"no session of yours is called {told.decode('utf-8', 'replace')[:100]!r}")
        for session in found:
            self.gateway.sessions.end(session)
        body = {"id": told.decode("utf-8", "replace"), "object": "session.deleted", "deleted": True}
        return wire.whole(200, msgspec.json.encode(body), incoming)

    def _sessions_called(self, told: bytes, tenant: Tenant) -> list[Session]:
        gateway = self.gateway
        value = clean(told)
        if value is None:
            return []
        carried = gateway.sessions.sticky.open(tenant.seed, value)
        key = None
        if carried is None and len(value) == 32:
            try:
                key = bytes.fromhex(value.decode("ascii", "replace"))
            except ValueError:
                key = None
        session = None if key is None else gateway.sessions.get(key)
        if session is not None:
            return [session] if session.tenant == tenant.name else []
        models = {*gateway.routing.models, *gateway.fleet.known_models, *gateway.options.configured}
        # A token of a session that another gateway made, or this one before a restart, names one made from it.
        name = Found("x-session-id", value) if carried is None else Found("sticky", carried.key, carried=carried)
        found = [gateway.sessions.get(keys_of(name, tenant.name, model)[0]) for model in models]
        return [session for session in found if session is not None]
