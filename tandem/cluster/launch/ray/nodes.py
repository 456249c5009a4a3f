"""The node of an actor."""

import contextlib
import os
import threading
import time

import ray

_LOOK_S = 2.0


def node_name() -> str:
    """Returns Ray's name of this process's node."""
    node = ray.get_runtime_context().get_node_id()
    return next((str(each["NodeName"]) for each in ray.nodes() if each["NodeID"] == node), node)


def end_with_node() -> None:
    """Ends this process, and its children with it, as soon as Ray takes its node for dead: another one takes its place."""
    node = ray.get_runtime_context().get_node_id()

    def watch() -> None:
        while True:
            time.sleep(_LOOK_S)
            with contextlib.suppress(ray.exceptions.RayError, OSError):
                if any(each["NodeID"] == node and not each["Alive"] for each in ray.nodes()):
                    os._exit(1)

    threading.Thread(target=watch, name="node", daemon=True).start()
