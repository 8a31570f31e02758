"""Who pays: credentials to tenants.

Whose a credential is gets found once for each connection and kept with its head (`gateway.http.incoming.Shape.memo`), so that
a client that keeps its connection costs no look-up a request. It is found once more when the configuration or a file of keys
changes, for then all of this is made anew: what a `Tenants` said holds for it alone. Only `Guesses` outlives it. What a token
said holds until it expires.

Without tenants everybody is one anonymous tenant and clients' credentials pass through to the workers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import time
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.config_tenants import ANONYMOUS
from gateway.credentials import Keyring
from gateway.errors import Forbidden, GuessedTooOften, Unauthorized
from gateway.guesses import Guesses
from gateway.http.incoming import Peer
from gateway.meters import Limits, Meter
from gateway.oidc import NotGenuine, Tokens
from gateway.trials import Policies


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant."""

    name: str
    policies: Policies | None = None
    """``None``: the model's own, or the default."""
    by_model: Mapping[str, Policies] = field(default_factory=dict)
    """Model -> how its requests for that one are routed."""
    models: frozenset[str] | None = None
    """Names it may use (aliases included); ``None``: all."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of its own -> models, or their common aliases."""
    shows_routing: bool = True
    """Whether answers tell it where and why they were routed."""
    hides_addresses: bool = False
    """Whether errors of engines are passed on to it without addresses."""
    isolated: bool = False
    """Whether its prompts never share the index with others'."""
    canonical: frozenset[str] = frozenset()
    """Steps of `gateway.canonical` by which its bodies are brought into one form."""
    priority: str | None = None
    """Name of the level in which its requests wait; ``None``: the first."""
    weight: float = 1.0
    """How many times as much as another's it may have when there is not enough for all."""
    limits: Limits = field(default_factory=Limits)
    meter: Meter | None = None
    """Counts what it uses, where it has limits."""
    log_content: bool = False
    """Whether reports may show some of its prompts' text."""
    space: bytes = b""
    """Its part of a namespace; empty while it shares."""
    seed: int = 0
    """64 bits that keep its sessions apart from others'."""

    def __post_init__(self) -> None:
        self.seed = xxh3_64_intdigest(self.name.encode())
        if self.isolated:
            self.space = self.name.encode()

    def called(self, model: str) -> str:
        """The common name of what it calls ``model``."""
        return self.aliases.get(model, model)

    def may_use(self, model: str) -> bool:
        """Whether it may use what it calls ``model``."""
        return self.models is None or model in self.models or self.aliases.get(model) in self.models

    def check_model(self, model: str) -> None:
        """Raises `Forbidden` if the tenant may not use ``model``."""
        if not self.may_use(model):
            raise Forbidden(f"this key may not use the model {model!r}", param="model")


class Known(NamedTuple):
    """Whose a credential is, and by whose word."""

    by: object
    """`Tenants.mark` of those who said so."""
    tenant: Tenant
    until: float | None = None
    """Unix seconds; ``None``: while they say so."""

    def holds(self, mark: object) -> bool:
        """Whether it is so still."""
        return self.by is mark and (self.until is None or time() < self.until)


class Unknown(Unauthorized):
    """A key that is nobody's."""


class Tenants:
    """All tenants, found by credential.

    ``keyed``: there are tenants, though no key may be anybody's just now. ``claims``: values in tokens -> tenants;
    ``subjects``: names in certificates -> tenants. ``counted`` is told each credential that fails: missing, unknown, token,
    limited.
    """

    def __init__(
        self,
        keys: Iterable[tuple[str, Tenant]] = (),
        anonymous: Tenant | None = None,
        *,
        keyed: bool = False,
        tokens: Tokens | None = None,
        claims: Mapping[str, Tenant] | None = None,
        subjects: Mapping[str, Tenant] | None = None,
        guesses: Guesses[Known] | None = None,
        filed: bytes = b"",
        counted: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._keys = Keyring(keys)
        self.keyed = keyed or len(self._keys) > 0
        """Whether credentials are ours to read, and so must not reach a worker."""
        self.anonymous = anonymous if anonymous is not None or self.keyed else Tenant(ANONYMOUS, log_content=True)
        """Who a request without a key belongs to; ``None``: it is refused."""
        self.mark = object()
        self.filed = filed
        """Digest of what files of keys say."""
        self.guesses = guesses or Guesses[Known]()
        self._counted = counted
        self._tokens = tokens
        self._claims = dict(claims or {})
        self._subjects = dict(subjects or {})
        self._named = {tenant.name: tenant for tenant in self.all()}

    def all(self) -> list[Tenant]:
        """Each of them, once for each way to be it."""
        named = [*self._keys.owners(), *self._claims.values(), *self._subjects.values()]
        return [*named, *([self.anonymous] if self.anonymous else [])]

    def policies(self) -> list[Policies]:
        """Policies that tenants have of their own."""
        return [
            each for tenant in self.all() for each in (tenant.policies, *tenant.by_model.values()) if each is not None
        ]

    def shows_content(self, name: str) -> bool:
        """Whether reports may show some of that tenant's text."""
        tenant = self._named.get(name)
        return tenant is not None and tenant.log_content

    def of(
        self, named: Mapping[bytes, bytes], memo: dict[object, object] | None = None, peer: Peer | None = None
    ) -> Tenant:
        """The tenant of a request. Raises `Unauthorized`, or `GuessedTooOften` to an address that guesses.

        ``memo``: what is known of this head. ``peer``: who sent it; ``None``: an operator, who is not limited.
        """
        if memo is not None:
            known = memo.get("tenant")
            if isinstance(known, Known) and known.holds(self.mark):
                return known.tenant
        known = self._find(named, peer)
        if memo is not None:
            memo["tenant"] = known
        return known.tenant

    def forget(self) -> None:
        """Nothing that was said of a credential holds any more: tokens' keys changed."""
        self.mark = object()

    def _find(self, named: Mapping[bytes, bytes], peer: Peer | None) -> Known:
        if not self.keyed:
            assert self.anonymous is not None
            return Known(self.mark, self.anonymous)
        key = _credential(named)
        if key is None:
            return Known(self.mark, self._unnamed(peer))
        digest = self.guesses.digest(key)
        known = self.guesses.good(digest)
        if known is not None and known.holds(self.mark):
            return known
        if known is None and peer is not None:
            self._slow(peer)
        try:
            found = self._look(key)
        except (NotGenuine, Unknown):
            if peer is not None:
                self.guesses.failed(peer.address, digest)
            raise
        except Unauthorized:
            self.guesses.forget(digest)
            raise
        self.guesses.passed(digest, found)
        return found

    def _unnamed(self, peer: Peer | None) -> Tenant:
        """Of a request without a credential: whom its certificate names."""
        if peer is not None and self._subjects:
            named = {id(tenant): tenant for each in peer.subjects if (tenant := self._subjects.get(each)) is not None}
            if len(named) > 1:
                raise Forbidden("the certificate names several tenants")
            if named:
                return next(iter(named.values()))
        if self.anonymous is not None:
            return self.anonymous
        self._counted("missing")
        raise Unauthorized("a key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")

    def _look(self, key: bytes) -> Known:
        """Whose credential it is. Raises `Unknown`, `Unauthorized`, `Forbidden`, or `NoKeys`."""
        tokens = self._tokens
        if tokens is not None and tokens.looks(key):
            try:
                found = tokens.verify(key)
            except Unauthorized:
                self._counted("token")
                raise
            named = {id(tenant): tenant for each in found.values if (tenant := self._claims.get(each)) is not None}
            if len(named) != 1:
                which = "several tenants" if named else "no tenant that is known here"
                raise Forbidden(f"the token is good, but names {which}")
            return Known(self.mark, next(iter(named.values())), found.until)
        tenant = self._keys.find(key)
        if tenant is None:
            self._counted("unknown")
            raise Unknown("this key is not known here")
        return Known(self.mark, tenant)

    def _slow(self, peer: Peer) -> None:
        try:
            self.guesses.check(peer.address)
        except GuessedTooOften:
            self._counted("limited")
            raise


def _credential(named: Mapping[bytes, bytes]) -> bytes | None:
    value = named.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer" and key:
            return key.strip()
        return value
    return named.get(b"x-api-key")
