"""Who sends a request, and what he may ask for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.gateway import GatewayConfig, LimitConfig, TenantConfig
from tandem.gateway.audit import Entry
from tandem.gateway.headers import Headers, first_values
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

    def shares(self, tokens: int, model: str | None, input_tokens: int = 0) -> list[Share]:
        """Returns what a request of ``tokens`` tokens, ``input_tokens`` of them its prompt, for ``model`` takes of the limits of key, tenant and model."""
        limits = [] if self.key is None else [(f"key {self.key.id}", self.key.limits)]
        limits.append((f"tenant {self.tenant}", self.settings.limits))
        if model is not None and model in self.settings.models:
            limits.append((f"tenant {self.tenant} model {model}", self.settings.models[model]))
        if model is not None and model in self.model_limits:
            limits.append((f"model {model}", self.model_limits[model]))
        return [share for who, each in limits for share in shares_of(who, each, tokens, input_tokens)]


class Auth:
    """Finds the caller of each request. ``keys`` and ``tokens``: ``None`` if there are none; without both no key is needed."""

    def __init__(self, config: GatewayConfig, keys: KeyFile | None, tokens: "Tokens | None" = None) -> None:
        self._config, self.keys, self.tokens = config, keys, tokens

    def follow(self, config: GatewayConfig, keys: KeyFile | None, tokens: "Tokens | None") -> None:
        """Takes other limits of tenants and models, and other keys and tokens."""
        self._config, self.keys, self.tokens = config, keys, tokens

    @property
    def needs_key(self) -> bool:
        return self.keys is not None or self.tokens is not None

    def caller(self, headers: Headers, client: str) -> Caller:
        """Returns the caller of a request with ``headers`` from the address ``client``. Raises ``ApiError`` for a key that is missing, wrong or expired."""
        if not self.needs_key:
            return Caller(client, None, self._tenant(client), self._config.model_limits)
        record = self._record(headers)
        return Caller(record.tenant, record, self._tenant(record.tenant), self._config.model_limits)

    def administrator(self, headers: Headers, client: str, entry: Entry | None, *, changes: bool) -> str:
        """Returns words for the administrator who sends a request, which ``changes`` something or only looks; ``entry`` is told whose key it has. Raises
        ``ApiError`` for anybody else."""
        if not self.needs_key:
            check_local(headers, client, changes=changes)
            return f"an administrator at {client}"
        record = self._record(headers)
        if entry is not None:
            entry.tenant, entry.key = record.tenant, record.id
        if record.role != "admin":
            raise ApiError(403, f"the key {record.id} is not an administrator's; 'tandem keys create --role admin' makes one", kind="permission_error",
                           code="not_an_administrator")  # fmt: skip
        return f"the administrator with the key {record.id}"

    @property
    def records(self) -> Mapping[str, KeyRecord] | None:
        """The keys by their ids, ``None`` if no key is needed."""
        return None if self.keys is None else self.keys.records

    def _tenant(self, name: str) -> TenantConfig:
        return self._config.tenants.get(name, self._config.other_tenants)

    def _record(self, headers: Headers) -> KeyRecord:
        """Returns the key of a request, or that which its token stands for. Raises ``ApiError`` for one that is missing, wrong or expired."""
        given = _given(headers)
        if self.tokens is not None and given.count(".") == 2:
            return self.tokens.record(given)
        record = None if self.keys is None else find_key(self.keys.records, given)
        if record is None:
            raise unauthorised("a key is missing or wrong: 'Authorization: Bearer KEY', or 'x-api-key: KEY' as Anthropic's clients send it")
        if record.is_expired(time.time()):
            raise unauthorised(f"the key {record.id} has expired; ask for a new one")
        return record


def _given(headers: Headers) -> str:
    """Returns the key of a request as OpenAI's clients send it, else as Anthropic's do; empty if there is none."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].decode("latin-1")
    return first_values(headers).get(b"x-api-key", b"").decode("latin-1")
