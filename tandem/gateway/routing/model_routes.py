"""Which model answers a request for a name: the targets of a route by their shares, and the shadows that are sent a copy."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.routing import RouteConfig
from tandem.gateway.pool import Pool
from tandem.gateway.routing.hashing import fraction, rank
from tandem.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class Routed:
    """``model``: the name at the backends. ``shadows``: the models that are sent a copy."""

    model: str | None
    shadows: tuple[str, ...] = ()


class ModelRoutes:
    """The routes of a gateway's file. ``stages``: the version in each stage of the registry (``qwen@production``: ``qwen/3``), kept up to date by others."""

    def __init__(self, routes: Mapping[str, RouteConfig], pool: Pool, stages: Mapping[str, str]) -> None:
        self._routes, self._pool, self._stages = routes, pool, stages

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients can ask for beside those of the backends' models."""
        return tuple(self._routes)

    @property
    def models(self) -> tuple[str, ...]:
        """All names that clients can ask for, each once."""
        return tuple(dict.fromkeys([*self.names, *self._pool.models]))

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` for a name that nobody answers to."""
        if name is None or self._at_backends(name) == name:
            self._pool.check_model(name, self.names)

    def version_of(self, name: str | None) -> tuple[str | None, str]:
        """Returns the model and the version of its weights that a client's ``name`` asks for (``qwen@0.7``; empty: any). Raises ``ApiError`` for a version that
        no backend has."""
        if name is None or "@" not in name or name in self.models or self._at_backends(name) != name:
            return name, ""
        model, _, version = name.rpartition("@")
        versions = self._pool.weight_versions(model)
        if versions and version not in versions:
            known = ", ".join(f"{model}@{each}" for each in versions)
            raise ApiError(404, f"no backend serves the model '{model}' with the weights '{version[:100]}'; there is {known}", param="model",
                           code="model_not_found")  # fmt: skip
        return (model, version) if versions else (name, "")

    def route(self, name: str | None, session: str) -> Routed:
        """Returns where a request for ``name`` of ``session`` (empty: none) goes. A session stays at its target, whatever gateway it comes through."""
        route = self._routes.get(name) if name is not None else None
        if name is None or route is None:
            return Routed(None if name is None else self._at_backends(name))
        key = session or uuid.uuid4().hex
        ready = [target for target in route.targets if self._pool.has_ready(self._at_backends(target.model))]
        target = max(ready or route.targets, key=lambda each: rank(key, each.model, each.share))
        shadows = [each.model for each in route.shadows if fraction(f"shadow {each.model}\0{key}") < each.share]
        return Routed(self._at_backends(target.model), tuple(map(self._at_backends, shadows)))

    def _at_backends(self, name: str) -> str:
        """Returns the name at the backends: that of the version if ``name`` is a stage of the registry."""
        return self._stages.get(name.removeprefix("models/"), name)
