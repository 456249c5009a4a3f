"""A version that was staged beside an engine's steps is the version that an engine reads in its pause: the same tokens before and after, whatever is damaged,
killed or missing in between."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_pod import PANELS, PROMPTS, ROWS, Pod, tokens

from tandem import LLM, SamplingParams
from tandem.engine.core import staging
from tandem.engine.core.staging import Staging
from tandem.model.weight_digests import weight_digests
from tandem.types import DamagedWeights, RunError, WeightSource, WeightVersion
from tandem.weight_transfer.update import WeightReader

PARAMS = SamplingParams(n=2, max_tokens=30, seed=11, temperature=0.9, ignore_eos=True)
STEPS = 6


@pytest.fixture
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    kind, compute = getattr(request, "param", ("qwen3", PANELS))
    made = Pod(tmp_path, kind, compute=compute)
    yield made
    made.close()


def version(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def across_an_update(llm: LLM, source: WeightSource, step: int, *, stages: bool) -> list[Any]:
    """Draws, updates to the weights of ``step`` in the middle, and draws on. Returns everything that is known of each token, and of the weights."""
    engine, done = llm.engine, {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{i}", prompt["prompt_token_ids"], PARAMS, key=i)
    under_way = None
    for number in range(2 * STEPS):
        if number == STEPS and stages:
            under_way = engine.stage_weights_from(source, version(step))
        engine.step()
    assert under_way is None or under_way.result()
    engine.update_weights_from(source, version(step))
    while engine.has_unfinished_requests:
        for output in engine.step():
            done[output.request_id] = [(one.token_ids, one.raw_logprobs, one.weight_versions) for one in output.outputs]
    return [[done[f"r{i}"] for i in range(len(PROMPTS))], engine.held_digests(), engine.weight_version]


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize(
    "pod", [("qwen3", PANELS), pytest.param(("odd", ROWS[0]), marks=pytest.mark.full), pytest.param(("llama", PANELS), marks=pytest.mark.full)], indirect=True
)
def test_tokens_around_an_update_are_those_of_an_engine_that_reads_in_its_pause(pod: Pod, shares: bool) -> None:
    source = replace(pod.source, shares=shares)
    staged, plain = pod.engine(), pod.engine()
    pod.publish(1, 1)
    for llm in (staged, plain):
        llm.update_weights_from(source, version(1))
    for step, seed in ((2, 2), (3, 1), (4, 3)):
        pod.publish(seed, step)
        outputs = [across_an_update(llm, source, step, stages=llm is staged) for llm in (staged, plain)]
        assert outputs[0] == outputs[1] and staged.engine.shares_weights == shares
        versions = {each for sampled in outputs[0][0] for one in sampled for each in one[2]}
        assert versions == {version(step - 1), version(step)}, "it was updated in the middle"
    assert tokens(staged) == pod.expected(3)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"enable_prefix_caching": False}], ids=str)
def test_tokens_of_quantized_weights_and_caches_are_the_same_too(pod: Pod, options: dict[str, Any]) -> None:
    pod.publish(1, 1)
    outputs = [across_an_update(pod.llm(pod.folder / "model", **options), replace(pod.source, shares=False), 1, stages=stages) for stages in (True, False)]
    assert outputs[0] == outputs[1]


def test_experts_are_staged_and_digests_are_those_of_the_plain_weights(make_folder: Any, tmp_path: Path) -> None:
    from tandem.model.huggingface.model_folder import read_tensors
    from tandem.trainer.checkpoint.replica_state import WeightShard
    from tandem.trainer.parallel.ranks import alone
    from tandem.weight_transfer.convert import place_shards
    from tandem.weight_transfer.manifest import whole_offsets

    made, weights = Pod(tmp_path, "qwen3"), dict(read_tensors(make_folder("mixtral", 1)))
    shards = [WeightShard(name, tuple(t.shape), whole_offsets(tuple(t.shape)), t.dtype, lambda t=t: t) for name, t in weights.items()]
    made.writer.publish(place_shards(alone().world, shards), version(1))
    with LLM(make_folder("mixtral"), digest_weights=True) as llm, LLM(make_folder("mixtral", 1), digest_weights=True) as there:
        assert llm.engine.stage_weights_from(WeightSource(made.source.store), version(1)).result()
        assert llm.engine.weight_digests != there.engine.weight_digests, "nothing was taken yet"
        llm.update_weights_from(WeightSource(made.source.store), version(1))
        assert llm.engine.weight_digests == there.engine.weight_digests and tokens(llm) == tokens(there)
        assert llm.engine.held_digests() == there.engine.held_digests() == [weight_digests(there.engine.decoder)]
    made.close()


def flip(pod: Pod, step: int) -> None:
    """Alters a bit of the published weights of ``step``."""
    (segment,) = (each for each in pod.buffers.segments if each.contents is not None and each.contents.version == version(step))
    segment.memory[300] ^= 4


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "copied"])
def test_damage_is_caught_before_the_exchange_and_a_repaired_version_is_staged_again(pod: Pod, shares: bool) -> None:
    llm, source = pod.engine(), replace(pod.source, shares=shares)
    pod.publish(1, 1)
    llm.update_weights_from(source, version(1))
    pod.publish(2, 2)
    flip(pod, 2)
    under_way = llm.engine.stage_weights_from(source, version(2))
    with pytest.raises(DamagedWeights, match="was read twice and does not have its digest"):
        under_way.result()
    assert llm.weight_version == version(1) and tokens(llm) == pod.expected(1)
    with pytest.raises(DamagedWeights):
        llm.update_weights_from(source, version(2))
    pod.publish(2, 2)
    assert llm.engine.stage_weights_from(source, version(2)).result()
    assert llm.weight_version == version(1)
    # The repaired version is in the buffer that the version before was in, so an engine that shares must not sample before it has taken it.
    assert shares or tokens(llm) == pod.expected(1), "staging changes nothing that is sampled"
    llm.update_weights_from(source, version(2))
    assert tokens(llm) == pod.expected(2)


def test_shared_memory_that_is_written_to_after_staging_is_read_anew(pod: Pod) -> None:
    llm = pod.engine()
    pod.publish(1, 1)
    assert llm.engine.stage_weights_from(pod.source, version(1)).result()
    (segment,) = (each for each in pod.buffers.segments if each.contents is not None)
    segment.contents = None
    with pytest.raises(RunError, match="were published again or replaced while they were read"):
        llm.update_weights_from(pod.source, version(1))
    assert llm.weight_version != version(1)
    pod.publish(1, 1)
    llm.update_weights_from(pod.source, version(1))
    assert tokens(llm) == pod.expected(1)


def test_short_memory_is_told_once_and_the_update_is_read_in_the_pause(pod: Pod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    llm, source = pod.engine(), replace(pod.source, shares=False)
    pod.publish(1, 1)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(staging, "available_bytes", lambda limit: 1000)
        assert not llm.engine.stage_weights_from(source, version(1)).result()
        patched.undo()
        patched.setattr(staging.RankWeights, "read", lambda *_: (_ for _ in ()).throw(MemoryError("no page is left")))
        assert not llm.engine.stage_weights_from(source, version(1)).result()
    short = [record.message for record in caplog.records if "memory is too short to stage" in record.message]
    assert len(short) == 2 and "may be used; the engine pauses" in short[0] and "no page is left" in short[1]
    llm.update_weights_from(source, version(1))
    assert tokens(llm) == pod.expected(1)


@pytest.mark.parametrize("what", ["unverified", pytest.param("ranks", marks=pytest.mark.full)])
def test_what_cannot_be_staged_is_read_in_the_pause(pod: Pod, what: str, make_folder: Any, request: pytest.FixtureRequest) -> None:
    llm = pod.engine() if what == "unverified" else request.getfixturevalue("ranks")(make_folder("qwen3"))
    source = replace(pod.source, verifies=what != "unverified")
    pod.publish(1, 1)
    assert not llm.engine.stage_weights_from(source, version(1)).result()


def test_a_version_that_was_staged_and_not_taken_gives_way_to_the_next(pod: Pod) -> None:
    llm, source = pod.engine(), replace(pod.source, shares=False)
    pod.publish(1, 1)
    first = llm.engine.stage_weights_from(source, version(1))
    assert first.result()
    pod.publish(2, 2)
    assert llm.engine.stage_weights_from(source, version(2)).result() and first.staged is None
    llm.update_weights_from(source, version(2))
    assert tokens(llm) == pod.expected(2)
    pod.publish(3, 3)
    llm.engine.stage_weights_from(source, version(3))
    pod.publish(1, 4)
    llm.update_weights_from(source, version(4))
    assert llm.weight_version == version(4) and tokens(llm) == pod.expected(1)


def test_an_update_and_the_end_of_an_engine_wait_for_what_is_being_staged(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, source, may_read = pod.engine(), replace(pod.source, shares=False), threading.Event()
    read = WeightReader.read

    def late(reader: WeightReader, *given: Any) -> Any:
        assert may_read.wait(60)
        return read(reader, *given)

    monkeypatch.setattr(WeightReader, "read", late)
    pod.publish(1, 1)
    under_way = llm.engine.stage_weights_from(source, version(1))
    before = tokens(llm)
    assert before == tokens(llm) and under_way.staged is None, "it samples while it stages"
    threading.Timer(0.2, may_read.set).start()
    llm.update_weights_from(source, version(1))
    assert tokens(llm) == pod.expected(1) != before
    may_read.clear()
    pod.publish(2, 2)
    under_way = llm.engine.stage_weights_from(source, version(2))
    threading.Timer(0.2, may_read.set).start()
    llm.close()
    assert isinstance(under_way, Staging) and under_way.staged is not None


STAGER = """
import sys, time
from tandem import LLM
from tandem.types import WeightSource, WeightVersion
from tandem.weight_transfer import update

def stops(reader, version=None):
    print("staging", flush=True)
    time.sleep(600)

llm = LLM(sys.argv[1], skip_tokenizer_init=True, kernels="cpu", dtype="float32", load_format="dummy", max_num_seqs=4, kv_cache_tokens=1024)
source = WeightSource(sys.argv[2])
llm.update_weights_from(source, WeightVersion(1, 1))
update.WeightReader.read = stops
llm.engine.stage_weights_from(source, WeightVersion(1, 1))
time.sleep(600)
"""


@pytest.mark.full
def test_an_engine_that_is_killed_while_it_stages_leaves_the_publication_to_the_next(pod: Pod) -> None:
    pod.publish(1, 1)
    command = [sys.executable, "-c", STAGER, str(pod.folder / "model"), pod.source.store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "staging\n"
        os.kill(process.pid, signal.SIGKILL)
    pod.publish(2, 2)
    llm = pod.engine()
    assert llm.engine.stage_weights_from(pod.source, version(2)).result()
    llm.update_weights_from(pod.source, version(2))
    assert tokens(llm) == pod.expected(2)
    assert torch.is_tensor(llm.engine.decoder.norm.weight)
