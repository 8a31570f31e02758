"""A request that was read and belongs to somebody, before it is known where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.dialects import Dialect, Reading, Route
from gateway.http.incoming import Incoming

if TYPE_CHECKING:
    from gateway.http.server import Inbound
    from gateway.tenants import Tenant


class Arrival:
    """What does not change about it from here on, and when it came this far, on the gateway's clock."""

    __slots__ = ("client", "dialect", "incoming", "read_at", "reading", "request_id", "route", "started", "tenant")

    def __init__(
        self,
        incoming: Incoming,
        client: Inbound,
        dialect: Dialect,
        route: Route,
        request_id: bytes,
        started: float,
        tenant: Tenant,
        reading: Reading,
        read_at: float,
    ) -> None:
        self.incoming = incoming
        self.client = client
        self.dialect = dialect
        self.route = route
        self.request_id = request_id
        self.started = started
        """When its last byte was there."""
        self.tenant = tenant
        self.reading = reading
        self.read_at = read_at
