"""Servers of one model with different roles: that they fit together, before one is started."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.config.servers import ServersConfig, flag_name
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.gateway import BackendConfig

TRANSFER_KEY = "kv_transfer_key"
_OF_BLOCKS = ("device", "dtype", "precision", "quantization", "kv_cache_dtype", "kernels", "model_impl", TRANSFER_KEY)
"""Flags of ``tandem serve`` on which it depends whether KV blocks of one server are of use to another."""


def models_apart(servers: Mapping[str, ServersConfig]) -> list[str]:
    """Returns the models whose servers exchange KV blocks: those of which a section has a role."""
    return list(dict.fromkeys(config.model_name(name) for name, config in servers.items() if config.role != "both"))


def check_roles(servers: Mapping[str, ServersConfig], backends: Sequence["BackendConfig"]) -> None:
    """Raises ``UserError`` for sections of one model that cannot work together, and for roles of which one half is missing."""
    by_model: dict[str, dict[str, ServersConfig]] = {}
    for name, config in servers.items():
        by_model.setdefault(config.model_name(name), {})[name] = config
    for model, sections in by_model.items():
        _check_sections(model, sections)
        if model in models_apart(sections):
            _check_halves(model, sections, [backend for backend in backends if not backend.models or model in backend.models])
    roles = {backend.role for backend in backends}
    if not servers and roles in ({"prefill"}, {"decode"}):
        has, lacks = (roles.pop(), "decode") if "prefill" in roles else ("decode", "prefill")
        raise UserError(f"all 'backends' have 'role: {has}'; give those that {'answer' if lacks == 'decode' else 'compute prompts'} role: {lacks}")


def _check_sections(model: str, sections: Mapping[str, ServersConfig]) -> None:
    (first, one), *others = sections.items()
    by_role: dict[str, str] = {}
    for name, config in sections.items():
        other = by_role.setdefault(config.role, name)
        if other != name:
            raise UserError(
                f"'servers.{other}' and 'servers.{name}' both serve '{model}' with role {config.role}; make them one section with a higher 'count', "
                "or give them different roles"
            )
    for name, config in others:
        if config.model != one.model:
            raise UserError(f"'servers.{first}' serves '{model}' from '{one.model}' and 'servers.{name}' from '{config.model}'; name the same 'model' in both")
        ours, theirs = _flags(one), _flags(config)
        for flag in _OF_BLOCKS:
            if ours.get(flag) != theirs.get(flag):
                shown = "" if flag == TRANSFER_KEY else f" ({ours.get(flag, 'not given')} and {theirs.get(flag, 'not given')})"
                raise UserError(
                    f"'servers.{first}' and 'servers.{name}' serve '{model}' with different values of the flag {flag.replace('_', '-')}{shown}, so that one "
                    "cannot use the KV blocks of the other; give both the same"
                )


def _check_halves(model: str, sections: Mapping[str, ServersConfig], backends: Sequence["BackendConfig"]) -> None:
    name, config = next((name, config) for name, config in sections.items() if config.role != "both")
    known = {config.role for config in sections.values()} | {backend.role for backend in backends if backend.role is not None}
    may_have_any = any(backend.role is None for backend in backends)
    fix = f"add a section with served_model_name: {model} and role:"
    if "prefill" not in known and not may_have_any:
        raise UserError(f"'servers.{name}' has role {config.role}, and no server computes prompts for '{model}'; {fix} prefill, or leave the role out")
    if not known & {"decode", "both"} and not may_have_any:
        raise UserError(f"'servers.{name}' has role {config.role}, and no server answers with the prompts that it computes; {fix} decode")
    foreign = next((backend for backend in backends if backend.role is not None), None)
    if foreign is not None and TRANSFER_KEY not in _flags(config):
        raise UserError(
            f"backend {foreign.label} has role {foreign.role} beside 'servers.{name}', whose key for KV blocks the gateway makes, so that they cannot exchange "
            "any; give all servers of the model one key: the flag kv-transfer-key: '@FILE'"
        )


def _flags(config: ServersConfig) -> dict[str, Any]:
    return {flag_name(key): value for key, value in config.flags.items()}
