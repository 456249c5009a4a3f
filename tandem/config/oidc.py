"""The section ``oidc`` of a gateway's file."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.config.limits import check_seconds
from tandem.types.errors import UserError

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a private key. With those by a shared secret the public keys of the issuer would be secrets."""


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """Tokens of an OpenID Connect issuer (Keycloak, Entra, Okta, Google, Dex), which clients send in place of a key: `Authorization: Bearer TOKEN`."""

    issuer: str = ""
    """Address of the issuer, the claim `iss` of its tokens. Empty: no tokens are taken."""
    audience: str = ""
    """The claim `aud` that a token must have, so that one that was made for another service is worth nothing here."""
    jwks_url: str = ""
    """Where the issuer's public keys are. Empty: what `ISSUER/.well-known/openid-configuration` says."""
    tenant_claim: str = "sub"
    """The claim that names the tenant, for example `azp`, `org_id` or `email`."""
    models_claim: str = ""
    """The claim with the models that the token allows: a list, or names divided by spaces. Empty: all models."""
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    """Signatures that are taken."""
    refresh_s: float = 300.0
    """How often the issuer's keys are read again; a token with a key that is not known has them read at once."""
    leeway_s: float = 30.0
    """How far the clocks of issuer and gateway may be apart."""

    def check(self) -> None:
        check_seconds("oidc", self, "refresh_s")
        if not 0 <= self.leeway_s <= 3600:
            raise UserError(f"'oidc.leeway_s' is {self.leeway_s:g}; it must be from 0 to 3600 seconds")
        for name in ("issuer", "jwks_url"):
            url = getattr(self, name)
            try:
                parts = urlsplit(url)
            except ValueError:
                raise UserError(f"'oidc.{name}' is {url!r}, which is not a URL; write https://HOST/PATH") from None
            if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None):
                raise UserError(f"'oidc.{name}' is {url!r}; write https://HOST/PATH")
        if self.issuer and not self.audience:
            raise UserError("'oidc.audience' is empty, so that a token for any service would be taken; give what the issuer writes into tokens for this one")
        if not self.issuer and (self.audience or self.jwks_url or self.models_claim):
            raise UserError("'oidc.issuer' is empty, and other keys of 'oidc' are given; give the address of the issuer")
        unknown = [name for name in self.algorithms if name not in ALGORITHMS]
        if unknown or not self.algorithms:
            raise UserError(f"'oidc.algorithms' has {unknown[0] if unknown else 'no entry'}; it can have {', '.join(ALGORITHMS)}")
        if not self.tenant_claim:
            raise UserError("'oidc.tenant_claim' is empty; name the claim of a token that is its tenant, for example sub")
