"""Published weights reach an engine of one or several tensor-parallel ranks, each of which reads its own slices: all ranks or none."""

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tandem import LLM, SamplingParams
from tandem.config.load import read_yaml
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, RunError, WeightSource, WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import part_offsets
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.transport import mooncake
from tandem.weight_transfer.transport.service import WeightService

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5], list(range(3, 20)), [7] * 16)]
PARAMS = SamplingParams(n=2, max_tokens=20, seed=11, temperature=0.9, ignore_eos=True)


class Published:
    """A pod's shared memory and its published version."""

    def __init__(self, folder: Path) -> None:
        self.buffers = WeightBuffers.create("test" + uuid.uuid4().hex[:8], 1 << 20)
        self.source = WeightSource(str(folder / "store.sqlite"))
        self.store = EmbeddedStore(Path(self.source.store))
        self.writer = WeightWriter(self.buffers, self.store, threads=1)

    def publish(self, folder: Path, version: WeightVersion, cut: str = "none") -> None:
        """Returns the weights of ``folder``, whole or with matrices in two parts of ``rows`` or ``columns``."""
        shards = [shard for name, t in load_file(folder / "model.safetensors").items() for shard in parts(name, t, cut)]
        self.writer.publish(place_shards(alone().world, shards), version)

    def flip(self, name: str, part: int) -> None:
        found = current(self.store)
        assert found is not None
        entry = next(entry for entry in found[0].tensors if entry.name == name)
        segment = next(s for s in self.buffers.segments if s.name == entry.segment)
        segment.memory[part_offsets(entry)[part] + 3] ^= 1


def parts(name: str, tensor: torch.Tensor, cut: str) -> list[WeightShard]:
    box, whole = whole_offsets(tuple(tensor.shape)), tuple(tensor.shape)
    boxes = [box]
    if cut != "none" and len(whole) == 2:
        axis = 0 if cut == "rows" else 1
        middle = whole[axis] // 3
        boxes = [
            ShardOffsets(box.start, tuple(middle if i == axis else n for i, n in enumerate(whole))),
            ShardOffsets(tuple(middle if i == axis else 0 for i in range(2)), box.stop),
        ]
    return [WeightShard(name, whole, part, tensor.dtype, partial(tensor.__getitem__, part.slices)) for part in boxes]


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    made = Published(tmp_path)
    yield made
    made.store.close()
    made.writer.close()
    made.buffers.close()


def generate(llm: LLM) -> list[Any]:
    return [answer.outputs for answer in llm.generate(PROMPTS, PARAMS)]


def tokens(llm: LLM) -> list[Any]:
    return [[(one.token_ids, one.raw_logprobs) for one in outputs] for outputs in generate(llm)]


def size_of(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("cut", ["none", "rows", "columns"])
def test_every_rank_reads_its_own_slices_whoever_owns_them(make_folder, make_llm, ranks, published, cut) -> None:
    llm, version = ranks(make_folder("qwen3")), WeightVersion(1, 1)
    published.publish(make_folder("qwen3", 1), version, cut)
    updated = llm.update_weights_from(published.source, version)
    assert tokens(llm) == tokens(make_llm("qwen3", 1)) and llm.weight_version == version
    whole = size_of(make_folder("qwen3", 1))
    assert updated.rereads == () and whole <= updated.size_bytes < 1.05 * whole, "all that both hold are norms"
    published.publish(make_folder("qwen3"), WeightVersion(1, 2), cut)
    llm.update_weights_from(published.source, WeightVersion(1, 2))
    assert tokens(llm) == tokens(make_llm("qwen3"))


@pytest.mark.parametrize("of_ranks", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_engine_that_takes_weights_unverified_holds_them_when_it_is_told_that_they_were_verified(make_folder, make_llm, ranks, published, of_ranks) -> None:
    llm, version = (ranks if of_ranks else LLM)(make_folder("qwen3")), WeightVersion(1, 1)
    published.publish(make_folder("qwen3", 1), version, "columns" if of_ranks else "rows")
    updated = llm.update_weights_from(replace(published.source, verifies=False), version)
    assert llm.weight_version == WeightVersion(-1, -1)
    llm.engine.confirm_weights(version)
    assert llm.weight_version == version and tokens(llm) == tokens(make_llm("qwen3", 1))
    found = current(published.store)
    assert found is not None and updated.revision == found[1]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2"])
def test_ranks_that_sum_partial_products_read_columns(make_folder, ranks, published, architecture) -> None:
    llm, other = (ranks(make_folder(architecture, seed), deterministic=False) for seed in (0, 1))
    published.publish(make_folder(architecture, 1), WeightVersion(1, 1), "rows")
    llm.update_weights_from(published.source, WeightVersion(1, 1))
    assert tokens(llm) == tokens(other)


def test_damage_that_one_rank_alone_sees_changes_no_rank(make_folder, make_llm, ranks, published) -> None:
    llm, name = ranks(make_folder("qwen3")), "model.layers.1.mlp.up_proj.weight"
    published.publish(make_folder("qwen3"), WeightVersion(2, 0))
    llm.update_weights_from(published.source, WeightVersion(2, 0))
    before = tokens(llm)
    published.publish(make_folder("qwen3", 1), WeightVersion(2, 1), "rows")
    # Rows after the first third, which are all that the second rank needs.
    published.flip(name, 1)
    with pytest.raises(DamagedWeights, match=f"tensor '{name}' of weights of step 1 .* was read twice"):
        llm.update_weights_from(published.source, WeightVersion(2, 1))
    assert llm.weight_version == WeightVersion(2, 0) and tokens(llm) == before
    published.publish(make_folder("qwen3", 1), WeightVersion(2, 1), "rows")
    llm.update_weights_from(published.source, WeightVersion(2, 1))
    assert tokens(llm) == tokens(make_llm("qwen3", 1))


def test_weights_of_another_version_or_model_are_refused_and_the_engine_stays(make_folder, make_llm, ranks, published) -> None:
    for llm in (ranks(make_folder("qwen3")), make_llm("qwen3")):
        before, version = tokens(llm), llm.weight_version
        with pytest.raises(RunError, match="no weights are published"):
            llm.update_weights_from(WeightSource(published.source.store + ".empty"), WeightVersion(3, 1))
        published.publish(make_folder("qwen3", 1), WeightVersion(3, 1))
        with pytest.raises(RunError, match=r"of step 2 \(incarnation 3\) were requested, but of step 1"):
            llm.update_weights_from(published.source, WeightVersion(3, 2))
        published.store.delete("weights/current")
        published.publish(make_folder("llama"), WeightVersion(3, 1))
        with pytest.raises(RunError, match="the engine's model has None"):
            llm.update_weights_from(published.source, WeightVersion(3, 1))
        assert tokens(llm) == before and llm.weight_version == version
        published.store.delete("weights/current")


def test_an_engine_of_one_rank_reads_parts_of_many_owners(make_folder, make_llm, published) -> None:
    llm = LLM(make_folder("mixtral"), max_num_seqs=16, max_num_batched_tokens=64)
    published.publish(make_folder("mixtral", 1), WeightVersion(4, 1), "columns")
    updated = llm.update_weights_from(published.source, WeightVersion(4, 1))
    assert updated.size_bytes == size_of(make_folder("mixtral", 1)) and tokens(llm) == tokens(make_llm("mixtral", 1))
    llm.close()


@contextmanager
def second_pod(folder: Path, credential: str) -> Iterator[RpcClient]:
    """Runs the shim of another pod's rollout sidecar, with a store and shared memory of its own and no worker."""
    (folder / "pod").mkdir(parents=True)
    (folder / "logs").mkdir()
    recipe = read_yaml(str(Path(__file__).parents[1] / "pod" / "tiny.yaml"))
    # Its workers are not started.
    (folder / "config.yaml").write_text(yaml.safe_dump({**recipe, "machine": {"fork_workers": False}}))
    write_credential(folder / "pod" / "credential", credential)
    port = folder / "port"
    settings = {"run": folder, "pod-id": "test" + uuid.uuid4().hex[:8], "credential": folder / "pod" / "credential", "port-file": port, "threads": 1}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tandem.pod.shim", "--role", "rollout", "--deadline", "60", *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as shim:
        try:
            while not port.exists():
                assert shim.poll() is None, "the second pod's shim did not start"
                time.sleep(0.01)
            yield RpcClient("the second pod", int(port.read_text()), credential)
        finally:
            shim.terminate()


@pytest.mark.parametrize("protocol", ["tcp", "mooncake"])
def test_an_engine_of_another_pod_has_the_same_weights_and_log_probabilities(make_folder, make_llm, published, tmp_path, protocol) -> None:
    if protocol == "mooncake" and mooncake.module() is None:
        pytest.skip("Mooncake (the extra `mooncake`, and the system's libibverbs1) is not installed, so its transfers are not tested")
    here, there, credential = make_llm("qwen3"), make_llm("qwen3"), new_credential()
    own = WeightSource(str(tmp_path / "second" / "pod" / "store.sqlite"))
    service = WeightService("first", published.buffers.segments, published.store, credential, (protocol,))
    with second_pod(tmp_path / "second", credential) as shim:
        first, second = (load_file(make_folder("qwen3", weights) / "model.safetensors") for weights in (1, 0))
        # The second time without those that are the same, which this pod has.
        known = sum(tensor.nbytes for name, tensor in second.items() if torch.equal(tensor, first[name]))
        for step, weights, there_before in ((1, 1, 0), (2, 0, known)):
            published.publish(make_folder("qwen3", weights), WeightVersion(1, step), "rows")
            meta = {"store": published.source.store, "own_store": own.store, "version": [1, step], "protocols": [], "deadline_s": 60}
            got = shim.call("receive_weights", meta, deadline_s=60).meta
            size_bytes = size_of(make_folder("qwen3", weights)) - there_before
            assert (got["protocol"], got["bytes"], got["rereads"]) == (protocol, size_bytes, []), step
            here.update_weights_from(published.source, WeightVersion(1, step))
            there.update_weights_from(own, WeightVersion(1, step))
            assert tokens(there) == tokens(here) == tokens(make_llm("qwen3", weights))
    service.close()
