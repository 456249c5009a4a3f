"""The control calls of a rollout sidecar, with vLLM's names. They answer to the control key alone."""

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from tandem.serving.engines.slot import Weights
from tandem.serving.errors import ApiError, invalid
from tandem.serving.parsed_route import ParsedRoute
from tandem.serving.protocol import AbortRequest, InitTransfer, StartUpdate, UpdateWeights
from tandem.serving.state import ServerState
from tandem.types import UserError, WeightVersion

PATHS = (
    "/pause", "/resume", "/is_paused", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info",
    "/weight_checker",
)  # fmt: skip


def router(state: ServerState) -> APIRouter:
    """All control calls."""
    routes = APIRouter(tags=["control"], route_class=ParsedRoute)
    _pausing(routes, state)
    _weights(routes, state)
    return routes


def _pausing(routes: APIRouter, state: ServerState) -> None:
    pool = state.pool

    @routes.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep", "recompute"] = "abort") -> dict[str, Any]:
        """Stops taking steps until ``/resume``; requests that arrive meanwhile wait. ``abort``: in-flight requests are answered with
        the tokens that they have. ``wait``: they are finished first. ``recompute``: they are kept and continue at ``/resume``; after an
        update their keys and values are recomputed."""
        if mode == "keep":
            raise invalid(
                "pause mode keep would continue with keys and values of older weights, so results would not be reproducible; use mode=recompute", "mode"
            )
        await _refusing(pool.pause(mode))
        return {"is_paused": pool.is_paused}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        await pool.resume()
        return {"is_paused": pool.is_paused}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": pool.is_paused}

    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequest | None = None) -> dict[str, Any]:
        """End requests now, all of them without ``request_ids``; each is answered with what it has, as ``abort``."""
        chosen = None if body is None else body.request_ids
        ids = None if chosen is None else pool.ids_of(chosen)
        return {"aborted": sum(answer["aborted"] for answer in await pool.call("abort_requests", ids=ids))}

    @routes.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=1, le=1)] = 1) -> dict[str, Any]:
        """Give the memory of the KV cache back. In-flight requests go on after ``/wake_up``; new ones get 503."""
        await _refusing(pool.sleep())
        return {"is_sleeping": pool.is_sleeping}

    @routes.post("/wake_up")
    async def wake_up() -> dict[str, Any]:
        await pool.wake_up()
        return {"is_sleeping": pool.is_sleeping}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": pool.is_sleeping}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        await pool.call("reset_prefix_cache")
        return {}


def _weights(routes: APIRouter, state: ServerState) -> None:
    pool = state.pool

    @routes.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitTransfer | None = None) -> dict[str, Any]:
        """Agree on how weights come: ``folder``, from safetensors files on the server's disk."""
        backend = ((body.init_info if body is not None else None) or {}).get("backend", "folder")
        if backend != "folder":
            raise invalid(f"the weight transfer backend is {str(backend)[:40]!r}; this server has 'folder'", "init_info")
        return {"backend": backend}

    @routes.post("/start_weight_update")
    async def start_weight_update(body: StartUpdate | None = None) -> dict[str, Any]:
        """Begin an update; one that was begun before is forgotten. ``version``: [incarnation, step] of the new weights."""
        before = pool.weights.version
        asked = body.version if body is not None else None
        version = WeightVersion(*asked) if asked is not None else WeightVersion(before.incarnation, before.step + 1)
        if version == before:
            raise invalid(f"version {list(version)} is the one that is served; give new weights a new version", "version")
        await pool.call("start_weight_update")
        state.update = (version, [])
        return {"version": list(version)}

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeights) -> dict[str, Any]:
        """Read the safetensors of ``update_info.folder`` beside the weights in use. Several calls may bring a part each."""
        if state.update is None:
            raise invalid("no weight update was started; call /start_weight_update first")
        folder = body.update_info.folder
        if "\0" in folder or not Path(folder).is_dir():
            raise invalid(f"'{folder[:200]}' is not a folder on the server's disk", "update_info")
        answers = await _refusing(pool.call("update_weights", folder=folder))
        state.update[1].append(folder)
        return {"tensors": answers[0]["tensors"]}

    @routes.post("/finish_weight_update")
    async def finish_weight_update(mode: Literal["at_once", "rolling"] = "at_once") -> dict[str, Any]:
        """Applies all tensors that were read, between two steps, or none if the set is incomplete. ``at_once``: in all instances; in-flight requests continue
        with the new weights. ``rolling``: in one instance after the other, each after it has finished what it has."""
        if state.update is None:
            raise invalid("no weight update was started; call /start_weight_update first")
        (version, folders), state.update = state.update, None
        answers: list[dict[str, Any]] = await _refusing((pool.update_rolling if mode == "rolling" else pool.update)(Weights(version, tuple(folders))))
        return answers[0]

    @routes.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        """The version of the weights in use, by instance."""
        answers = await pool.call("weight_info")
        return answers[0] | {"instances": [answer["version"] for answer in answers]}

    @routes.get("/weight_checker")
    async def weight_checker() -> dict[str, Any]:
        """The xxh3-128 of every tensor in the engine's dtype, taken from the engine's own memory after loading; and whether all
        instances agree."""
        answers = await _refusing(pool.call("weight_checker"))
        checked: dict[str, Any] = answers[0] | {"instances_agree": all(answer == answers[0] for answer in answers)}
        return checked


async def _refusing(call: Any) -> Any:
    """What ``call`` gives; what a user can mend becomes a 400."""
    try:
        return await call
    except ApiError:
        raise
    except UserError as error:
        raise invalid(str(error)) from None
