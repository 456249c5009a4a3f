"""The two sidecars as the pod's controller sees them: what can be asked of each, typed.

Whether a call crosses two processes or none is the channel's business (``tandem.pod.channel``).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.pod.channel import Channel
from tandem.types import Prompt, Sample, Score, WeightVersion
from tandem.types.wire import decode_samples, encode_prompts, encode_samples, encode_scores

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TrainerSidecar:
    """The figure's Megatron sidecar."""

    channel: Channel

    def create_model(self, on_progress: Progress | None = None) -> dict[str, Any]:
        """Make or check the model folder and say what stands in it: shapes, folder, context, special tokens."""
        return self.channel.call("create_model", on_progress=on_progress).meta

    def warm_up(self, on_progress: Progress | None = None) -> dict[str, Any]:
        """SFT on demonstrations; writes the warm start's folder once and returns its figures."""
        return self.channel.call("warm_up", on_progress=on_progress).meta

    def load(self, step: int | None) -> int:
        """Load checkpoint ``step`` (``None``: the newest committed one, or the start); returns the step it stands at."""
        return int(self.channel.call("load", {"step": step}).meta["step"])

    def inference(self, step: int, samples: Sequence[Sample]) -> dict[str, Any]:
        """The reference model's log-probabilities of ``samples``, kept by the worker for ``train``."""
        return self.channel.call("inference", {"step": step}, {"samples": encode_samples(samples)}).meta

    def train(
        self, step: int, samples: Sequence[Sample], scores: Sequence[Score], on_progress: Progress | None = None
    ) -> dict[str, float]:
        """One optimizer step from the state after ``step`` steps; returns its metrics."""
        blobs = {"samples": encode_samples(samples), "scores": encode_scores(scores)}
        metrics: dict[str, float] = self.channel.call("train", {"step": step}, blobs, on_progress=on_progress).meta["metrics"]
        return metrics

    def offload(self) -> dict[str, Any]:
        return self.channel.call("offload").meta

    def onload(self) -> dict[str, Any]:
        return self.channel.call("onload").meta

    def convert(self) -> dict[str, Any]:
        return self.channel.call("convert").meta

    def register(self, version: WeightVersion) -> dict[str, Any]:
        """Write the converted weights to the segment that is free and publish their manifest."""
        return self.channel.call("register", {"version": list(version)}).meta

    def save(self, step: int) -> dict[str, Any]:
        """Commit a checkpoint of the state after ``step`` optimizer steps."""
        return self.channel.call("save", {"step": step}).meta

    def export(self, folder: str) -> dict[str, Any]:
        """Write the actor as a Hugging Face folder."""
        return self.channel.call("export", {"folder": folder}).meta

    def memory(self) -> dict[str, int]:
        return self.channel.memory()


@dataclass(frozen=True, slots=True)
class RolloutSidecar:
    """The figure's vLLM sidecar."""

    channel: Channel

    def start_engine(self) -> dict[str, Any]:
        """Start the worker's engine with dummy weights."""
        return self.channel.call("start_engine").meta

    def update_weight(self, version: WeightVersion) -> dict[str, Any]:
        """Read, verify and apply the weights published as ``version``."""
        return self.channel.call("update_weight", {"version": list(version)}).meta

    def rollout(
        self, step: int, prompts: Sequence[Prompt], settings: dict[str, Any], on_progress: Progress | None = None
    ) -> list[Sample]:
        """Samples of ``prompts``; ``settings`` are sampling settings, the group size and the purpose."""
        reply = self.channel.call(
            "rollout", {"step": step, "settings": settings}, {"prompts": encode_prompts(prompts)}, on_progress=on_progress
        )
        return decode_samples(reply.blobs["samples"])

    def terminate_engine(self) -> None:
        """End the worker's process and everything it holds."""
        self.channel.stop_worker()

    def memory(self) -> dict[str, int]:
        return self.channel.memory()


def describe(meta: dict[str, Any]) -> str:
    """``meta`` on one line, for logs."""
    return json.dumps(meta, sort_keys=True, default=str)
