"""The host process of a ``reasoning_gym`` task: ``python -m tandem.data.tasks.reasoning_gym_host --channel FD``."""

import argparse
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.types import UserError

BLOCK_INSTANCES = 256
MOST_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Dataset:
    """The first call, ``open``: a dataset by name, with its settings. The answer is the ``version`` of the package."""

    dataset: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """The call ``instance``: one of the instances generated from a seed. The answer is an ``Instance``."""

    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class Instance:
    """``metadata``: the package's additional values, as far as JSON can represent them."""

    question: str
    answer: Any
    metadata: dict[str, Any]


@lru_cache(maxsize=MOST_BLOCKS)
def make_dataset(dataset: str, settings_json: str, seed: int) -> Any:
    """Returns the ``reasoning_gym`` dataset of BLOCK_INSTANCES instances. Raises ``UserError`` if the package, the name or a setting is
    wrong."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("tasks of reasoning_gym need a package; install it with: pip install 'tandem-rl[reasoning-gym]'") from None
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
    """Returns the dataset and the entry that the ``columns`` of a ``ReasoningGymTask`` describe. Needs a process with the host's hash
    seed."""
    dataset = make_dataset(columns["dataset"], json.dumps(columns["settings"], sort_keys=True), columns["seed"])
    return dataset, dataset[columns["index"]]


class Host:
    """One dataset, opened by the first call."""

    def __init__(self) -> None:
        self.dataset, self.settings = "", "{}"

    def open(self, request: Dataset) -> str:
        """Returns the version of the package. Raises ``UserError``."""
        self.dataset, self.settings = request.dataset, json.dumps(request.settings, sort_keys=True)
        self._entry(0, 0)
        import reasoning_gym

        return str(reasoning_gym.__version__)

    def instance(self, request: InstanceRequest) -> Instance:
        """Returns an instance. Raises ``UserError`` if the generator fails."""
        entry = self._entry(request.seed, request.index)
        return Instance(entry["question"], entry["answer"], entry.get("metadata", {}))

    def _entry(self, seed: int, index: int) -> Any:
        try:
            return make_dataset(self.dataset, self.settings, seed)[index]
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"reasoning_gym:{self.dataset} failed: {type(error).__name__}: {' '.join(str(error).split())}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True)
    host = Host()

    def opened(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        return {"version": host.open(message_from(Dataset, meta))}, {}

    def instance(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        answer = message_meta(host.instance(message_from(InstanceRequest, meta)))
        # The package's values may be of any class.
        return json.loads(json.dumps(answer, default=str)), {}

    serve({"open": opened, "instance": instance}, parser.parse_args().channel)


if __name__ == "__main__":
    main()
