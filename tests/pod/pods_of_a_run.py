"""Two pods of one run on this machine: the first with trainer and engine, the second with an engine of its own; every sidecar in its processes."""

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pod_runs import RECIPE

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.layout.residents import KEEP
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.channel import RemoteChannel
from tandem.pod.failures import Role
from tandem.pod.prompts import prompt_source
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.types import Prompt, Sample, WeightVersion
from tandem.weight_transfer.manifest import segment_bytes


@dataclass
class TwoPods:
    """The pods ``first`` and ``second`` under ``folder``, which share the store of the first one and a credential."""

    folder: Path
    faults: FaultPlan | None = None
    source: Path = RECIPE
    channels: list[RemoteChannel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.credential = new_credential()
        for name in ("first", "second"):
            (self.folder / name / "pod").mkdir(parents=True)
            (self.folder / name / "logs").mkdir()
            shutil.copy(self.source, self.folder / name / "config.yaml")
            write_credential(self.folder / name / "pod" / "credential", self.credential)
        self.recipe = build(Recipe, read_yaml(self.source))
        self.store, self.model = str(self.folder / "first" / "pod" / "store.sqlite"), self.folder / "model"
        self.own_store = str(self.folder / "second" / "pod" / "store.sqlite")
        self.trainer = TrainerSidecar(self.open("first", "trainer"))
        self.engines = [RolloutSidecar(self.open(name, "rollout")) for name in ("first", "second")]

    def open(self, pod: str, role: Role) -> RemoteChannel:
        directory = self.folder / pod
        channel = RemoteChannel(role, directory, f"{pod}{secrets.token_hex(4)}", directory / "pod" / "credential", self.credential, 120.0, 1, self.faults)
        self.channels.append(channel)
        return channel

    def start(self) -> None:
        """Brings up every sidecar: the trainer with a fresh model, the engines with dummy weights."""
        self.trainer.channel.start()
        self.trainer.create_model(self.model)
        self.kernels = self.trainer.load(self.model, None, KEEP, ())["kernels"]
        self.buffers = self.trainer.channel.allocate(segment_bytes(read_shapes(self.model), self.recipe.trainer.dtype))
        for engine in self.engines:
            engine.channel.start()
            engine.start_engine(self.model, self.kernels)

    def register(self, version: WeightVersion) -> None:
        self.trainer.offload(version.step, release=False)
        self.trainer.convert(version.step)
        self.trainer.register(version, self.buffers)

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        source = prompt_source(self.recipe, self.model)
        try:
            return source.for_step(0)
        finally:
            source.close()

    def rollout(self, engine: RolloutSidecar, step: int) -> list[Sample]:
        """Returns samples of the same prompts, with the random numbers of step 0, under the weights of ``step``."""
        settings = sampling_settings(self.recipe.rollout, self.recipe.algorithm.group_size, self.recipe.run.seed)
        return engine.rollout(0, self.prompts, settings, weights=step)[0]

    def pids(self, role: Role) -> list[int]:
        """Returns the shims of ``role``, in the order of the pods."""
        return [channel.shim.pid for channel in self.channels if channel.role == role and channel.shim is not None]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
