"""Tokens of an identity provider (JWT, as OpenID Connect issues them): checked, and what they say of their tenant.

What a token says of itself is believed only after its signature is checked, by a key that the configured issuer published
(`gateway.jwks`) and an algorithm that is configured. Only algorithms of public keys can be: with a shared secret whoever can
check a token can make one. A key is used for the algorithms of its own kind alone, whatever the token's header claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.config_tenants import ASYMMETRIC
from gateway.errors import NoKeys, Unauthorized
from gateway.jwks import Key, KeySet

if TYPE_CHECKING:
    import jwt

LONGEST = 16 * 1024
"""Bytes of a token."""


class Verified(NamedTuple):
    """What a good token says."""

    values: list[str]
    """Of the claim that names its tenant."""
    until: float
    """Unix seconds: it is good no longer."""


class NotGenuine(Unauthorized):
    """The token was not made by the issuer: a guess, as a wrong key is. Others are genuine, but not good here, or now."""


class Tokens:
    """See the module's head. ``claim``: a name, or a path with dots, of what names the tenant; ``leeway``: seconds."""

    def __init__(
        self,
        keys: KeySet,
        *,
        issuer: str,
        audience: Sequence[str],
        claim: str,
        algorithms: Sequence[str],
        leeway: float,
    ) -> None:
        import jwt

        self.keys = keys
        self._jwt = jwt
        self._issuer, self._audience, self._claim = issuer, list(audience), claim
        self._algorithms = [name for name in algorithms if name in ASYMMETRIC]
        self._leeway = leeway

    @staticmethod
    def looks(credential: bytes) -> bool:
        """Whether a credential looks like a token."""
        return credential.startswith(b"eyJ") and credential.count(b".") == 2

    def verify(self, token: bytes) -> Verified:
        """What ``token`` says. Raises `Unauthorized`, or `NoKeys` while no key is known."""
        if not self.keys.keys:
            raise NoKeys("tokens cannot be checked yet: the keys of their issuer could not be read", retry_after=5)
        if len(token) > LONGEST:
            raise NotGenuine(f"the token has more than {LONGEST} bytes")
        text = token.decode("ascii", "replace")
        key, algorithm = self._key(text)
        jwt = self._jwt
        try:
            made = jwt.PyJWK(key.told, algorithm)
            claims: dict[str, Any] = jwt.decode(
                text,
                made,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._leeway,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            raise self._refusal(error) from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise NotGenuine("the token cannot be read") from None
        return Verified(self._values(claims), float(claims["exp"]) + self._leeway)

    def _key(self, text: str) -> tuple[Key, str]:
        try:
            header = self._jwt.get_unverified_header(text)
        except (self._jwt.PyJWTError, ValueError, RecursionError):
            raise NotGenuine("the token cannot be read") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._algorithms:
            raise NotGenuine("the token's algorithm is not taken here")
        if "crit" in header:
            raise NotGenuine("the token asks for extensions that are not known here")
        known = [key for key in self.keys.keys if key.fits(algorithm)]
        if kid is None:
            if len(known) == 1:
                return known[0], algorithm
            raise NotGenuine("the token does not say which key it was signed with")
        for key in known:
            if key.kid == kid:
                return key, algorithm
        self.keys.missed()
        raise NotGenuine("the token was signed with a key that is not known here")

    def _refusal(self, error: jwt.InvalidTokenError) -> Unauthorized:
        """In words of our own: those of the library may hold what the token says."""
        jwt = self._jwt
        for kind, words in (
            (jwt.ExpiredSignatureError, "the token has expired"),
            (jwt.ImmatureSignatureError, "the token is not good yet"),
            (jwt.InvalidAudienceError, "the token is for another audience"),
            (jwt.InvalidIssuerError, "the token is of another issuer"),
            (jwt.MissingRequiredClaimError, "the token lacks exp, iss or aud"),
        ):
            if isinstance(error, kind):
                return Unauthorized(words)
        return NotGenuine("the token's signature is not the issuer's")

    def _values(self, claims: Mapping[str, Any]) -> list[str]:
        found: Any = claims.get(self._claim)
        if found is None:
            found = claims
            for part in self._claim.split("."):
                found = found.get(part) if isinstance(found, dict) else None
        members = found if isinstance(found, list) else [found]
        return [member for member in members if isinstance(member, str)]
