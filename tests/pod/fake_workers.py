"""Rollout workers that draw one group a call, without engines."""

import threading
from collections.abc import Sequence
from typing import Any

from tandem.pod.rollout_workers import RolloutWorkers
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, WorkerDied
from tandem.types import FinishReason, Prompt, Sample, WeightVersion
from tandem.types.wire import Frame
from tandem.types.wire_records import decode_prompts, decode_samples, encode_prompts, encode_samples


def sample(prompt: Prompt, index: int) -> Sample:
    return Sample(
        f"0/{prompt.id}/{index}", prompt.id, index, prompt.token_ids, (5,), (-1.0,), (-1.0,), (WeightVersion(0, 0),), FinishReason.STOP, "x"
    )


class FakeWorker:
    """Finishes one group a call. Dies in its call number ``dies_at``, of ``death``; holds ``version`` after an update."""

    def __init__(self, dies_at: int = -1, version: Sequence[int] | None = None, death: WorkerDied | None = None) -> None:
        self.death = death or WorkerDied("a worker", "rollout", "a worker died")
        self.dies_at, self.version, self.calls, self.held = dies_at, version, 0, list[Prompt]()
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float, on_progress: Progress | None = None) -> Frame:
        with self.lock:
            self.asked.append(name)
            if name == "update_weight":
                version = list(self.version or (meta or {})["version"])
                return Frame({"version": version, "rereads": [], "kv_cache_bytes": 5, "base_bytes": 0, "seconds": 0.5}, {})
            if name == "start_engine":
                return Frame({"kv_cache_bytes": 5, "base_bytes": 0}, {})
            self.calls += 1
            if self.calls == self.dies_at:
                raise self.death
            assert meta is not None and blobs is not None
            self.held = ([] if not meta["adds"] else self.held) + decode_prompts(blobs["prompts"])
            prompt = self.held.pop(0)
            drawn = [sample(prompt, index) for index in range(meta["settings"]["n"])]
            return Frame({"finished": [prompt.id], "drafts": [3, 8, 5]}, {"samples": encode_samples(drawn)})


PROMPTS = [Prompt(f"p{number}", "", (1, number)) for number in range(7)]


def roll_out(workers: RolloutWorkers, restarts_left: int = 1) -> tuple[list[Sample], list[dict[str, Any]], dict[str, Any]]:
    progress: list[dict[str, Any]] = []
    meta = {"step": 0, "settings": {"n": 2}, "expected": [1.0] * len(PROMPTS), "restarts_left": restarts_left}
    reply, blobs = workers.rollout(meta, {"prompts": encode_prompts(PROMPTS), "unfinished": encode_samples([])}, progress.append)
    return [each for blob in blobs.values() for each in decode_samples(blob)], progress, reply
