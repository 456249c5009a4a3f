"""Parts of the gateway that need a package of an extra, which is imported only where the settings ask for it."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.config.gateway import GatewayConfig
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.gateway.oidc import Tokens
    from tandem.gateway.redis_limits import RedisLimits


def check_extras(config: GatewayConfig) -> None:
    """Raises ``UserError`` for a package that is not installed."""
    if config.redis.url and importlib.util.find_spec("redis") is None:
        raise UserError("'redis.url' is given, and the package redis is not installed; pip install 'tandem-rl[redis]'")
    if config.oidc.issuer and importlib.util.find_spec("jwt") is None:
        raise UserError("'oidc.issuer' is given, and the package pyjwt is not installed; pip install 'tandem-rl[oidc]'")


def make_tokens(config: GatewayConfig, say: Callable[[str], None]) -> "Tokens | None":
    """Returns what checks the tokens of the issuer, ``None`` if there is none. ``say``: writes a line for the operator."""
    if not config.oidc.issuer:
        return None
    from tandem.gateway.oidc import Tokens

    return Tokens(config.oidc, say)


def make_shared_limits(config: GatewayConfig, say: Callable[[str], None]) -> "RedisLimits | None":
    """Returns the limits that gateways share, ``None`` if each counts its own. ``say``: writes a line for the operator."""
    if not config.redis.url:
        return None
    from tandem.gateway.redis_limits import RedisLimits

    return RedisLimits(config.redis.url, config.redis.prefix, config.redis.timeout_s, say, processes=config.workers)
