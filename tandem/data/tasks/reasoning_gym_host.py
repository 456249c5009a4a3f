"""The process behind a ``reasoning_gym`` task: a line of JSON in, a line of JSON out.

The first line names ``dataset`` and ``settings``; every further one a ``seed`` and the ``index`` of the instance to
give.
"""

import difflib
import json
import socket
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tandem.types import UserError

BLOCK_INSTANCES = 256
MOST_BLOCKS = 128


@lru_cache(maxsize=MOST_BLOCKS)
def make_dataset(dataset: str, settings_json: str, seed: int) -> Any:
    """The ``reasoning_gym`` dataset of BLOCK_INSTANCES instances. Raises ``UserError`` where the package, the name or a
    setting is wrong."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("tasks of reasoning_gym need the package; install it with: pip install 'tandem-rl[reasoning-gym]'") from None
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1, cutoff=0.5)
        hint = f"did you mean 'reasoning_gym:{near[0]}'?" if near else "its gallery lists them"
        raise UserError(f"'task.name' is 'reasoning_gym:{dataset}', which the package does not have; {hint}")
    try:
        return reasoning_gym.create_dataset(dataset, **{**json.loads(settings_json), "seed": seed, "size": BLOCK_INSTANCES})
    except Exception as error:  # every dataset checks its settings in its own way
        problem = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"'task.settings' do not fit reasoning_gym:{dataset}: {problem}") from None


def instance_of(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the entry that ``columns`` of a ``ReasoningGymTask`` tell of. Needs a process with the host's
    hash seed."""
    dataset = make_dataset(columns["dataset"], json.dumps(columns["settings"], sort_keys=True), columns["seed"])
    return dataset, dataset[columns["index"]]


def answer_request(state: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What the line ``request`` is answered with. ``state`` keeps dataset and settings between lines."""
    try:
        if "dataset" in request:
            state.update(dataset=request["dataset"], settings=json.dumps(request["settings"], sort_keys=True))
            make_dataset(state["dataset"], state["settings"], 0)[0]
            import reasoning_gym

            return {"version": reasoning_gym.__version__}
        entry = make_dataset(state["dataset"], state["settings"], request["seed"])[request["index"]]
        return {"question": entry["question"], "answer": entry["answer"], "metadata": entry.get("metadata", {})}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"reasoning_gym:{state['dataset']} failed: {type(error).__name__}: {' '.join(str(error).split())}"}


def main(descriptor: int) -> None:
    """Serve the socket ``descriptor`` until the other side closes it."""
    state: dict[str, Any] = {}
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rw", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            lines.write(json.dumps(answer_request(state, json.loads(line)), default=str) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
