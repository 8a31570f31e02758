"""Who pays: credentials to tenants.

Whose a credential is gets found once for each connection and kept with its head (`gateway.http.incoming.Shape.memo`), so that
a client that keeps its connection costs no look-up a request. It is found once more when the configuration or a file of keys
changes, for then all of this is made anew: a `Tenants` never changes, and what it said holds for it alone. Only `Guesses`
outlives it.

Without tenants everybody is one anonymous tenant and clients' credentials pass through to the workers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.credentials import Keyring
from gateway.errors import Forbidden, GuessedTooOften, Unauthorized
from gateway.guesses import Guesses
from gateway.http.incoming import Peer
from policies.base import Policy

ANONYMOUS = "anonymous"


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant."""

    name: str
    policy: Policy | None = None
    """``None``: the model's own, or the default."""
    models: frozenset[str] | None = None
    """Names it may use (aliases included); ``None``: all."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of its own -> models, or their common aliases."""
    shows_routing: bool = True
    """Whether answers tell it where and why they were routed."""
    isolated: bool = False
    """Whether its prompts never share the index with others'."""
    canonical: frozenset[str] = frozenset()
    """Steps of `gateway.canonical` by which its bodies are brought into one form."""
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


class Tenants:
    """All tenants, found by credential.

    ``keyed``: there are tenants, though no key may be anybody's just now. ``counted`` is told each credential that fails:
    missing, unknown, limited.
    """

    def __init__(
        self,
        keys: Iterable[tuple[str, Tenant]] = (),
        anonymous: Tenant | None = None,
        *,
        keyed: bool = False,
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
        self._named = {tenant.name: tenant for tenant in self.all()}

    def all(self) -> list[Tenant]:
        """Each of them, once for each key."""
        return [*self._keys.owners(), *([self.anonymous] if self.anonymous else [])]

    def policies(self) -> list[Policy]:
        """Policies that tenants have of their own."""
        return [tenant.policy for tenant in self.all() if tenant.policy is not None]

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
            if isinstance(known, Known) and known.by is self.mark:
                return known.tenant
        tenant = self._find(named, peer)
        if memo is not None:
            memo["tenant"] = Known(self.mark, tenant)
        return tenant

    def _find(self, named: Mapping[bytes, bytes], peer: Peer | None) -> Tenant:
        if not self.keyed:
            assert self.anonymous is not None
            return self.anonymous
        key = _credential(named)
        if key is None:
            if self.anonymous is not None:
                return self.anonymous
            self._counted("missing")
            raise Unauthorized("a key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        digest = self.guesses.digest(key)
        known = self.guesses.good(digest)
        if known is not None and known.by is self.mark:
            return known.tenant
        if known is None and peer is not None:
            self._slow(peer)
        tenant = self._keys.find(key)
        if tenant is None:
            self._counted("unknown")
            if peer is not None:
                self.guesses.failed(peer.address, digest)
            raise Unauthorized("this key is not known here")
        self.guesses.passed(digest, Known(self.mark, tenant))
        return tenant

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
