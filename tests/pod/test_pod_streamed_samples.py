"""Samples go from the worker to the controller once: as they finish, or with the reply where they were not streamed or have changed since."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_workers import PROMPTS

from tandem.config.recipe import Recipe, load_config
from tandem.pod.channel import RemoteChannel
from tandem.pod.rollout_groups import RolloutGroups
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.types import FinishReason, Sample, WeightVersion, wire_records
from tandem.types.wire import Frame

SORT = Path(__file__).parents[2] / "recipes" / "sort.yaml"


def drawn(prompt: str, index: int, text: str = "") -> Sample:
    version = WeightVersion(1, 3)
    return Sample(f"3/{prompt}/{index}", prompt, index, (1, 2), (5,), (-0.5,), (-0.25,), (version,), FinishReason.STOP, text)


class Groups:
    """In the place of ``InFlightGroups``: ``streamed`` are told of first, and then ``returned``."""

    def __init__(self, streamed: Sequence[Sample], returned: Sequence[Sample]) -> None:
        self.streamed, self.returned = streamed, returned

    def add(self, *_: object) -> None: ...

    def draw(self, wait: str, on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None) -> list[Sample]:
        if on_samples is not None:
            on_samples(self.streamed)
        on_progress(1, 1)
        return list(self.returned)


def recipe() -> Recipe:
    return load_config(SORT, [])


@pytest.mark.parametrize("streams", [True, False])
def test_a_reply_has_the_samples_that_were_not_streamed_or_have_changed(streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same, old, late = drawn("a", 0), drawn("a", 1), drawn("a", 2)
    changed = dataclasses.replace(old, text="cut")
    own = recipe()
    groups, told = RolloutGroups(own, tmp_path), list[dict[str, Any]]()
    monkeypatch.setattr(groups, "_none", lambda engine, context: Groups([same, old], [same, changed, late]))
    meta = {"step": 3, "settings": sampling_settings(own.rollout, 3, 0), "stream": streams}
    reply, blobs = groups.draw(object(), 64, meta, {"prompts": wire_records.encode_prompts(PROMPTS[:1])}, told.append)  # type: ignore[arg-type]
    assert reply == {"finished": ["a"]}
    assert wire_records.decode_samples(blobs["samples"]) == ([changed, late] if streams else [same, changed, late])
    assert [wire_records.samples_from_text(each["samples"]) for each in told if "samples" in each] == ([[same, old]] if streams else [])


class StreamingChannel:
    """In the place of a ``Channel``: streams ``streamed`` and replies with ``replied``."""

    def __init__(self, streamed: Sequence[Sequence[Sample]], replied: Sequence[Sample]) -> None:
        self.streamed, self.replied = streamed, replied

    def call(self, name: str, meta: Any, blobs: Any, *, on_progress: Callable[[dict[str, Any]], None]) -> Frame:
        for each in self.streamed:
            on_progress({"samples": wire_records.samples_to_text(each)})
        return Frame({}, {"samples-0": wire_records.encode_samples(self.replied)}, "result")


def test_a_rollout_has_each_sample_once_and_in_order_however_it_came() -> None:
    first, second = PROMPTS[0].id, PROMPTS[1].id
    a, b, c, cut = drawn(first, 0), drawn(first, 1), drawn(second, 0), drawn(first, 1, "cut")
    # A group that is drawn again, by the worker that replaces another one, is streamed again.
    channel, heard = StreamingChannel([[c], [b, a], [a]], [cut]), list[Sample]()
    samples, _ = RolloutSidecar(channel).rollout(3, PROMPTS[:2], {}, weights=3, on_samples=heard.extend)  # type: ignore[arg-type]
    assert samples == [a, cut, c] and heard == [c, b, a, a]


def test_inference_and_update_of_the_same_samples_encode_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = list[int](), wire_records.encode_samples
    monkeypatch.setattr(wire_records, "encode_samples", lambda samples: encoded.append(len(samples)) or encode(samples))
    samples, encoder = [drawn("a", 0), drawn("a", 1)], TrainerSidecar(None).encode  # type: ignore[arg-type]
    assert encoder(samples) == encoder(tuple(samples)) == encode(samples) and encoded == [2]
    other = [samples[0], dataclasses.replace(samples[1], text="other")]
    assert encoder(other) == encode(other) and encoded == [2, 2]
    encoder.forget()
    assert encoder([]) == encode([]) and encoder(other[:1]) == encode(other[:1]) and encoded == [2, 2, 0, 1]


def test_the_memory_that_comes_with_a_reply_is_asked_for_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told, other = list[str](), {"rss_bytes": 7, "shm_bytes": 2}, {"rss_bytes": 9, "shm_bytes": 1}

    def ask(self: RemoteChannel, name: str, *_: object, **__: object) -> Frame:
        asked.append(name)
        return Frame(dict(other) if name == "memory" else {"memory": dict(told)} if name == "train" else {})

    monkeypatch.setattr(RemoteChannel, "_ask", ask)
    channel = RemoteChannel("trainer", Path(), "", Path(), "", 1.0, 1)
    assert channel.call("train").meta == {} and channel.memory() == told and channel.memory() == other
    channel.call("train")
    channel.call("offload")
    assert channel.memory() == other and asked == ["train", "memory", "train", "offload", "memory"]
