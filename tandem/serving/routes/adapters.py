"""The LoRA adapters that a server knows by name, as models of their own, and the calls that change them (with vLLM's names)."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from tandem.engine.lora.request import LoRARequest
from tandem.serving.engines.pool import Pool
from tandem.serving.errors import ApiError, invalid
from tandem.serving.parsed_route import ParsedRoute
from tandem.serving.protocol import LoadAdapter, UnloadAdapter
from tandem.types import UserError

PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass
class ServedAdapters:
    """By name, in the order in which they were loaded. An engine that lacks one, as after a restart, reads it when a request asks
    for it; one whose folder has changed is read again."""

    pool: Pool
    taken_names: tuple[str, ...]
    """Those of the model itself."""
    _found: dict[str, LoRARequest] = field(default_factory=dict)
    _ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._found)

    def get(self, name: str | None) -> LoRARequest | None:
        return None if name is None else self._found.get(name)

    async def load(self, name: str, path: str, replace: bool = False) -> None:
        """Loads the adapter in every engine; running requests that use its older content continue with the new one. Raises
        ``UserError``, and registers nothing, if the name is taken or an engine cannot use the adapter."""
        if name in self.taken_names:
            raise UserError(f"adapter '{name}' has the model's own name; give it another")
        held = self._found.get(name)
        if held is not None and not replace:
            raise UserError(f"adapter '{name}' is loaded; unload it first, or set load_inplace")
        request = LoRARequest(name, held.lora_int_id if held else next(self._ids), str(Path(path).absolute()))
        await self.pool.call("add_lora", adapter=adapter_meta(request))
        self._found[name] = request

    async def unload(self, name: str) -> None:
        """Unloads the adapter. Raises ``UserError`` if a running request uses it."""
        await self.pool.call("remove_lora", adapter=name)
        del self._found[name]


def adapter_meta(request: LoRARequest | None) -> list[Any] | None:
    """Returns ``request`` as the JSON value that is sent to an engine."""
    return None if request is None else [request.lora_name, request.lora_int_id, request.lora_path]


def router(adapters: ServedAdapters) -> APIRouter:
    """Returns the routes ``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, which require the control key."""
    routes = APIRouter(tags=["control"], route_class=ParsedRoute)

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter) -> dict[str, Any]:
        """Serve the PEFT folder ``lora_path``, on the server's disk, as the model ``lora_name``."""
        if "\0" in body.lora_path or not Path(body.lora_path).is_dir():
            raise invalid(f"'{body.lora_path[:200]}' is not a folder on the server's disk", "lora_path")
        try:
            await adapters.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        except UserError as error:
            raise invalid(str(error), "lora_name") from None
        return {"loaded": body.lora_name}

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter) -> dict[str, Any]:
        if adapters.get(body.lora_name) is None:
            raise ApiError(404, f"the adapter '{body.lora_name[:100]}' is not loaded", param="lora_name", code="model_not_found")
        try:
            await adapters.unload(body.lora_name)
        except UserError as error:
            raise invalid(str(error), "lora_name") from None
        return {"unloaded": body.lora_name}

    return routes
