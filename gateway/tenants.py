"""Who pays: API keys to tenants.

A key is looked up by its SHA-256, so comparing takes the same time whatever is guessed and no key is kept in clear.
Without tenants everybody is one anonymous tenant and clients' credentials pass through to the workers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from xxhash import xxh3_64_intdigest

from gateway.errors import Forbidden, Unauthorized
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
    shows_routing: bool = True
    """Whether answers tell it where and why they were routed."""
    hides_addresses: bool = False
    """Whether errors of engines are passed on to it without addresses."""
    isolated: bool = False
    """Whether its prompts never share the index with others'."""
    canonical: frozenset[str] = frozenset()
    """Steps of `gateway.canonical` by which its bodies are brought into one form."""
    space: bytes = b""
    """Its part of a namespace; empty while it shares."""
    seed: int = 0
    """64 bits that keep its sessions apart from others'."""

    def __post_init__(self) -> None:
        self.seed = xxh3_64_intdigest(self.name.encode())
        if self.isolated:
            self.space = self.name.encode()

    def check_model(self, model: str) -> None:
        """Raises `Forbidden` if the tenant may not use ``model``."""
        if self.models is not None and model not in self.models:
            raise Forbidden(f"this key may not use the model {model!r}", param="model")


class Tenants:
    """All tenants, found by credential."""

    def __init__(self, keys: Iterable[tuple[str, Tenant]] = (), anonymous: Tenant | None = None) -> None:
        self._by_digest = {sha256(key.encode()).digest(): tenant for key, tenant in keys}
        self.anonymous = anonymous if anonymous is not None or self._by_digest else Tenant(ANONYMOUS)
        """Who a request without a key belongs to; ``None``: it is refused."""

    @property
    def keyed(self) -> bool:
        """Whether credentials are ours to read, and so must not reach a worker."""
        return bool(self._by_digest)

    def all(self) -> list[Tenant]:
        """Each of them, once for each key."""
        return [*self._by_digest.values(), *([self.anonymous] if self.anonymous else [])]

    def policies(self) -> list[Policy]:
        """Policies that tenants have of their own."""
        return [tenant.policy for tenant in self.all() if tenant.policy is not None]

    def of(self, named: Mapping[bytes, bytes]) -> Tenant:
        """The tenant of a request. Raises `Unauthorized`."""
        if not self._by_digest:
            assert self.anonymous is not None
            return self.anonymous
        key = _credential(named)
        if key is None:
            if self.anonymous is not None:
                return self.anonymous
            raise Unauthorized("a key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        tenant = self._by_digest.get(sha256(key).digest())
        if tenant is None:
            raise Unauthorized("this key is not known here")
        return tenant


def _credential(named: Mapping[bytes, bytes]) -> bytes | None:
    value = named.get(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer" and key:
            return key.strip()
        return value
    return named.get(b"x-api-key")
