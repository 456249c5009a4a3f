"""Tokens of an OpenID Connect issuer in place of API keys (OpenID Connect Core 1.0, RFC 7519)."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import jwt

from tandem.config.oidc import OidcConfig
from tandem.gateway.keys import KeyRecord
from tandem.serving.errors import ApiError, unauthorised, unavailable

_MOST_BYTES = 2**20
_TIMEOUT_S = 5.0
_AT_ONCE_S = 5.0
"""Between two readings of the keys that were not due: anybody can send a token with an unknown key."""
_MOST_REMEMBERED = 4096
_LONGEST_NAME = 256


class Tokens:
    """Checks tokens with the issuer's public keys. ``say``: writes a line when they can no longer be read, and when they can again."""

    def __init__(self, config: OidcConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._keys: dict[str, jwt.PyJWK] = {}
        self._wanted = asyncio.Event()
        self._checked: dict[str, tuple[KeyRecord, float]] = {}
        """Records of good tokens and when they expire; the signature of each is checked once."""

    async def read(self, session: aiohttp.ClientSession) -> str:
        """Reads the issuer's keys; returns why they cannot be read, empty if they were."""
        try:
            self._keys = await self._read(session)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, TypeError, KeyError, jwt.PyJWTError) as error:
            return f"{type(error).__name__}: {error}"[:200]
        self._checked.clear()
        return ""

    async def keep(self, session: aiohttp.ClientSession) -> None:
        """Reads the issuer's keys, again and again, until it is cancelled."""
        trouble = ""
        while True:
            found = await self.read(session)
            if found != trouble:
                self._say(f"the keys of {self._config.issuer} cannot be read: {found}" if found else f"the keys of {self._config.issuer} can be read again")
            trouble = found
            self._wanted.clear()
            await asyncio.sleep(min(_AT_ONCE_S, self._config.refresh_s))
            if not trouble:
                try:
                    async with asyncio.timeout(max(0.0, self._config.refresh_s - _AT_ONCE_S)):
                        await self._wanted.wait()
                except TimeoutError:
                    pass

    def record(self, token: str) -> KeyRecord:
        """Returns what the sender of ``token`` may do. Raises ``ApiError`` for one that is not good."""
        now = time.time()
        known = self._checked.get(token)
        if known is not None and now < known[1]:
            return known[0]
        claims = self._claims(token)
        record = self._recorded(claims)
        if len(self._checked) >= _MOST_REMEMBERED:
            self._checked.clear()
        self._checked[token] = record, float(claims["exp"])
        return record

    def _claims(self, token: str) -> Mapping[str, Any]:
        config = self._config
        try:
            id = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(str(id)) if id is not None else next(iter(self._keys.values()), None) if len(self._keys) == 1 else None
            if key is None:
                if not self._keys:
                    raise unavailable("the keys of the tokens' issuer cannot be read now; try again", retry_after_s=int(_AT_ONCE_S))
                self._wanted.set()
                raise unauthorised("the token is signed with a key that its issuer does not list")
            claims: Mapping[str, Any] = jwt.decode(
                token, key, algorithms=list(config.algorithms), audience=config.audience, issuer=config.issuer, leeway=config.leeway_s,
                options={"require": ["exp", "iss", "aud", config.tenant_claim]},
            )  # fmt: skip
            return claims
        except jwt.ExpiredSignatureError:
            raise unauthorised("the token has expired; get a new one from its issuer") from None
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
            raise unauthorised("the token was not made for this service, or by another issuer") from None
        except jwt.MissingRequiredClaimError as error:
            raise unauthorised(f"the token has no claim '{error.claim}'") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise unauthorised("the token is not valid") from None

    def _recorded(self, claims: Mapping[str, Any]) -> KeyRecord:
        config = self._config
        tenant, models = claims[config.tenant_claim], claims.get(config.models_claim, ()) if config.models_claim else ()
        if not isinstance(tenant, str) or not tenant.isprintable() or not 0 < len(tenant) <= _LONGEST_NAME:
            raise unauthorised(f"the claim '{config.tenant_claim}' of the token names no tenant")
        names = models.split() if isinstance(models, str) else models
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise unauthorised(f"the claim '{config.models_claim}' of the token is no list of models")
        if config.models_claim and not names:
            raise ApiError(403, f"your token allows no model: its claim '{config.models_claim}' is empty", kind="permission_error", code="model_not_allowed")
        subject = claims.get("sub")
        return KeyRecord(f"token {subject if isinstance(subject, str) else tenant}"[:_LONGEST_NAME], "", tenant, tuple(names))

    async def _read(self, session: aiohttp.ClientSession) -> dict[str, jwt.PyJWK]:
        """Returns the issuer's keys by their ids. Raises ``ValueError`` and others."""
        url = self._config.jwks_url
        if not url:
            found = await _json(session, f"{self._config.issuer.rstrip('/')}/.well-known/openid-configuration")
            if found["issuer"] != self._config.issuer:
                raise ValueError(f"its configuration names the issuer {str(found['issuer'])[:100]!r}")
            url = found["jwks_uri"]
        keys = jwt.PyJWKSet.from_dict(dict(await _json(session, url))).keys
        return {key.key_id or f"unnamed {number}": key for number, key in enumerate(keys) if key.public_key_use in (None, "sig")}


async def _json(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    async with asyncio.timeout(_TIMEOUT_S), session.get(url) as response:
        if response.status != 200:
            raise ValueError(f"{url} answers {response.status}")
        content = json.loads(await response.content.read(_MOST_BYTES))
    if not isinstance(content, dict):
        raise ValueError(f"{url} is no JSON object")
    return content
