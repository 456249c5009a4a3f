"""Who sends a request, and what he may ask for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.gateway import GatewayConfig, LimitConfig, TenantConfig
from tandem.gateway.headers import Headers
from tandem.gateway.keys import KeyFile, KeyRecord, find_key
from tandem.gateway.local_admin import check_local
from tandem.gateway.rate_limit import Share, shares_of
from tandem.serving.errors import ApiError, unauthorised

if TYPE_CHECKING:
    from tandem.gateway.oidc import Tokens


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. ``key``: ``None`` where no key is needed."""

    tenant: str
    key: KeyRecord | None
    settings: TenantConfig
    model_limits: Mapping[str, LimitConfig]

    def check_model(self, model: str | None) -> None:
        """Raises ``ApiError`` for a model that the key does not allow."""
        if self.key is None or not self.key.models:
            return
        if model not in self.key.models:
            asked = "a request without 'model'" if model is None else f"the model '{model[:100]}'"
            raise ApiError(403, f"your key does not allow {asked}; it allows {', '.join(self.key.models)}", kind="permission_error", param="model",
                           code="model_not_allowed")  # fmt: skip

    def shares(self, tokens: int, model: str | None) -> list[Share]:
        """Returns what a request of ``tokens`` tokens for ``model`` takes of the limits of key, tenant and model."""
        limits = [] if self.key is None else [(f"key {self.key.id}", self.key.limits)]
        limits.append((f"tenant {self.tenant}", self.settings.limits))
        if model is not None and model in self.settings.models:
            limits.append((f"tenant {self.tenant} model {model}", self.settings.models[model]))
        if model is not None and model in self.model_limits:
            limits.append((f"model {model}", self.model_limits[model]))
        return [share for who, each in limits for share in shares_of(who, each, tokens)]


class Auth:
    """Finds the caller of each request. ``keys`` and ``tokens``: ``None`` if there are none; without both no key is needed."""

    def __init__(self, config: GatewayConfig, keys: KeyFile | None, tokens: "Tokens | None" = None) -> None:
        self._config, self._keys, self._tokens = config, keys, tokens

    def follow(self, config: GatewayConfig) -> None:
        """Takes other limits of tenants and models."""
        self._config = config

    def caller(self, headers: Headers, client: str) -> Caller:
        """Returns the caller of a request with ``headers`` from the address ``client``. Raises ``ApiError`` for a key that is missing, wrong or expired."""
        if self._keys is None and self._tokens is None:
            return Caller(client, None, self._tenant(client), self._config.model_limits)
        record = self._record(headers)
        return Caller(record.tenant, record, self._tenant(record.tenant), self._config.model_limits)

    def administrator(self, headers: Headers, client: str, *, changes: bool) -> str:
        """Returns words for the administrator who sends a request, which ``changes`` something or only looks. Raises ``ApiError`` for anybody else."""
        if self._keys is None and self._tokens is None:
            check_local(headers, client, changes=changes)
            return f"an administrator at {client}"
        record = self._record(headers)
        if record.role != "admin":
            raise ApiError(403, f"the key {record.id} is not an administrator's; 'tandem keys create --role admin' makes one", kind="permission_error",
                           code="not_an_administrator")  # fmt: skip
        return f"the administrator with the key {record.id}"

    @property
    def records(self) -> Mapping[str, KeyRecord] | None:
        """The keys by their ids, ``None`` if no key is needed."""
        return None if self._keys is None else self._keys.records

    def _tenant(self, name: str) -> TenantConfig:
        return self._config.tenants.get(name, self._config.other_tenants)

    def _record(self, headers: Headers) -> KeyRecord:
        """Returns the key of a request, or that which its token stands for. Raises ``ApiError`` for one that is missing, wrong or expired."""
        given = next((value[7:] for name, value in headers if name == b"authorization" and value[:7].lower() == b"bearer "), b"").decode("latin-1")
        if self._tokens is not None and given.count(".") == 2:
            return self._tokens.record(given)
        record = None if self._keys is None else find_key(self._keys.records, given)
        if record is None:
            raise unauthorised("a key is missing or wrong: 'Authorization: Bearer KEY'")
        if record.is_expired(time.time()):
            raise unauthorised(f"the key {record.id} has expired; ask for a new one")
        return record
