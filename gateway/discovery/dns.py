"""Workers that a name leads to: its addresses with one port, or its service records (SRV), asked for when they may change.

A name server that fails says nothing, and what it said last stays. That there is nothing of the name (NXDOMAIN, or an answer
without records) is believed only once it has been so for ``grace`` seconds: names vanish for a moment while a zone is reloaded
or a headless Service has no endpoint that is ready. Records live as their TTL says, within ``shortest`` and ``longest``.
Of service records those of the best priority count; their targets' names are the workers' hosts, looked up when connected to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from random import uniform
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from gateway.discovery.base import BadOption, Found, Lost, Source, listed, one_of, port as port_number, seconds, text
from gateway.workers import address

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

PATIENCE = 5.0
"""Seconds that name servers have for one question, all of them together."""
AGAIN, LATEST = 1.0, 30.0
"""Seconds until a question that failed is asked again, at first and at most."""
NAMESERVER_PORT = 53
FAMILIES = {"4": ("A",), "6": ("AAAA",), "any": ("A", "AAAA")}

Place = tuple[str, int]
"""Host and port."""


@dataclass(slots=True)
class Question:
    """One kind of record of the name, and what is known of it."""

    kind: str
    places: frozenset[Place] | None = None
    """``None``: nothing so far."""
    empty_since: float | None = None
    """Since when there are no such records."""
    due: float = 0.0
    pause: float = AGAIN


class DNS(Source):
    """``host`` with ``port``, or ``record: srv``, which has ports of its own. ``nameservers``: the system's, if not given."""

    def __init__(
        self,
        host: Any,
        port: Any = None,
        record: Any = "address",
        family: Any = "any",
        scheme: Any = "http",
        nameservers: Any = None,
        shortest: Any = "2s",
        longest: Any = "60s",
        grace: Any = "30s",
    ) -> None:
        if find_spec("dns") is None:
            raise BadOption("dns needs what is not installed: pip install 'warmroute[dns]'", "")
        self.host = text("host", host)
        self.record = one_of("record", record, ("address", "srv"))
        if self.record == "srv" and port is not None:
            raise BadOption("service records have ports of their own: take port out", "port")
        if self.record == "address" and port is None:
            raise BadOption("port is needed beside host, or record: srv", "port")
        self.port = None if port is None else port_number("port", port)
        # YAML reads 4 and 6 as numbers.
        self.kinds = ("SRV",) if self.record == "srv" else FAMILIES[one_of("family", str(family), tuple(FAMILIES))]
        self.scheme = one_of("scheme", scheme, ("http", "https"))
        self.nameservers = _servers(nameservers)
        self.shortest = seconds("shortest", shortest, 0.05, 3600)
        self.longest = seconds("longest", longest, self.shortest, 86_400)
        self.grace = seconds("grace", grace, 0, 86_400)

    async def watch(self) -> AsyncIterator[list[Found]]:
        """See the module's head."""
        resolver = self._resolver()
        questions = [Question(kind) for kind in self.kinds]
        before: list[Found] | None = None
        while True:
            now = monotonic()
            await asyncio.gather(*(self._ask(resolver, each) for each in questions if each.due <= now))
            self._tell(questions)
            # Most names have addresses of one family only: what the other says is not waited for.
            if any(each.places for each in questions) or all(each.places is not None for each in questions):
                places = frozenset[Place]().union(*(each.places or () for each in questions))
                found = listed([each for each in map(self._found, places) if each is not None])
                if found != before:
                    before = found
                    yield found
            await asyncio.sleep(max(0.0, min(each.due for each in questions) - monotonic()))

    def _found(self, place: Place) -> Found | None:
        """The worker there; ``None`` for a name that no host can have."""
        host, port = place
        url = f"{self.scheme}://[{host}]:{port}" if ":" in host else f"{self.scheme}://{host}:{port}"
        try:
            return Found(self.template.spec(url))
        except ValueError as error:
            self.contact.lost(Lost("malformed", f"{self.host} leads to what is no host: {error}"), "places")
            return None

    def _resolver(self) -> Resolver:
        """Raises `Lost`."""
        from dns.asyncresolver import Resolver
        from dns.exception import DNSException
        from dns.nameserver import Do53Nameserver

        try:
            resolver = Resolver(configure=not self.nameservers)
        except (DNSException, OSError) as error:
            raise Lost("access", f"the system's resolver is not configured: {error}") from None
        if self.nameservers:
            resolver.nameservers = [Do53Nameserver(host, port) for host, port in self.nameservers]
        resolver.lifetime = PATIENCE
        return resolver

    async def _ask(self, resolver: Resolver, question: Question) -> None:
        """Ask, and keep what was said."""
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN, LifetimeTimeout, NoAnswer

        places: frozenset[Place] = frozenset()
        wait = self.shortest
        try:
            answer = await resolver.resolve(self.host, question.kind)
            places = self._places(answer)
            # The shortest life of all that led there.
            wait = min(self.longest, max(self.shortest, answer.expiration - time()))
        except (NXDOMAIN, NoAnswer):
            pass
        except (DNSException, OSError, ValueError) as error:
            reason = "timeout" if isinstance(error, LifetimeTimeout) else "server_error"
            told = f"{question.kind} of {self.host} cannot be asked for: {_brief(error)}"
            self.contact.lost(Lost(reason, told), question.kind)
            question.due = monotonic() + question.pause * uniform(0.5, 1.0)
            question.pause = min(LATEST, 2 * question.pause)
            return
        question.pause = AGAIN
        now = monotonic()
        question.due = now + wait * uniform(0.9, 1.0)
        self._keep(question, places, now)

    def _keep(self, question: Question, places: frozenset[Place], now: float) -> None:
        """Believe what was said, unless it is nothing, and that is new."""
        if places:
            question.places, question.empty_since = places, None
            self.contact.well(question.kind)
            return
        if question.empty_since is None:
            question.empty_since = now
        if now - question.empty_since >= self.grace:
            question.places = frozenset()
        self.contact.well(question.kind)

    def _tell(self, questions: list[Question]) -> None:
        """Of nothing that is not believed yet."""
        doubted = any(each.empty_since is not None and each.places for each in questions)
        nothing = not any(each.places for each in questions) and any(each.places is None for each in questions)
        if doubted or nothing:
            self.contact.lost(Lost("empty", f"there is nothing of the name {self.host}"), "name")
        else:
            self.contact.well("name")

    def _places(self, answer: Any) -> frozenset[Place]:
        if self.record == "address":
            assert self.port is not None
            return frozenset((str(each.address), self.port) for each in answer)
        best = min((each.priority for each in answer), default=0)
        told = [each for each in answer if each.priority == best and each.port]
        named = [(each.target.to_text(omit_final_dot=True).lower(), int(each.port)) for each in told]
        # "." says that there is no such service.
        return frozenset(place for place in named if place[0] not in ("", ".", "@"))


def _servers(told: Any) -> list[Place]:
    """Addresses of name servers, with or without a port. Raises `BadOption`."""
    from ipaddress import ip_address

    if told is None:
        return []
    found: list[Place] = []
    for each in told if isinstance(told, list) else [told]:
        try:
            host, port = address(each) if isinstance(each, str) and "]:" in each else (each, NAMESERVER_PORT)
            if isinstance(each, str) and each.count(":") == 1:
                host, port = address(each)
            found.append((str(ip_address(host)), port))
        except ValueError:
            wrong = f"nameservers must be addresses such as 10.0.0.10 or 10.0.0.10:53, not {each!r}"
            raise BadOption(wrong, "nameservers") from None
    return found


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


SOURCE = DNS
