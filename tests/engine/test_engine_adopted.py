"""An engine computes with published weights where they are, without a copy: the same tokens and log-probabilities, and no memory of its own."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.kernels import KernelChoice, select
from tandem.kernels.api import PackedWeight
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.weight_digests import packed_tensors
from tandem.pod.release import release
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.rpc.calls import PeerDied
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, EngineDied, WeightSource, WeightVersion
from tandem.types.weights import Layout
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import whole_offsets
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5], list(range(3, 20)), [7] * 16)]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=11, temperature=0.9, ignore_eos=True)
TRAITS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True, "qk_norm": True},
    # The vocabulary and k are not in panels: the engine packs what stacks with them itself.
    "odd": {"architecture": "qwen3", "tie_word_embeddings": True, "qk_norm": True, "vocab_size": 70, "head_dim": 16},
}


class Compute(NamedTuple):
    """What an engine computes with: the kernels, the dtype of the weights, and the layout in which the kernels need matrices."""

    kernels: KernelChoice
    dtype: torch.dtype
    layout: Layout


PANELS = Compute("cpu", torch.float32, "panels")
ROWS = [Compute("reference", torch.bfloat16, "rows"), Compute("reference", torch.float32, "rows")]


def decoder_of(kind: str, seed: int, hidden: int = 32, compute: Compute = PANELS) -> Decoder:
    shapes = {
        "architecture": kind, "vocab_size": 80, "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 2 * max(32, hidden), "max_position_embeddings": 128,
    }  # fmt: skip
    decoder = Decoder(ModelShapes(**{**shapes, **TRAITS[kind]}), select(compute.kernels), dtype=compute.dtype)
    initialise(decoder, seed)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if tensor.dim() > 1:
                tensor.mul_(3)
            elif name.endswith("bias"):
                tensor.copy_(torch.linspace(-1.0, 1.0 + seed, len(tensor)))
    return decoder


class Pod:
    """The shared memory of a pod with what a trainer publishes, and engines."""

    def __init__(self, folder: Path, kind: str, size_bytes: int = 1 << 20, hidden: int = 32, compute: Compute = PANELS) -> None:
        self.folder, self.kind, self.hidden, self.compute = folder, kind, hidden, compute
        self.buffers = WeightBuffers.create("test" + uuid.uuid4().hex[:8], size_bytes)
        self.source = WeightSource(str(folder / "store.sqlite"), shares=True)
        self.store, kernels = EmbeddedStore(Path(self.source.store)), select("cpu")
        self.writer = WeightWriter(self.buffers, self.store, 1, kernels)
        save_model(self.decoder(0), folder / "model")

    def decoder(self, seed: int) -> Decoder:
        return decoder_of(self.kind, seed, self.hidden, self.compute)

    def publish(self, seed: int, step: int, axis: int | None = None) -> None:
        """``axis``: halves of q's rows (0), or of the columns of the output's and of down (1), are parts of their own, as of two tensor-parallel ranks."""
        cut = ("q_proj.weight",) if axis == 0 else ("o_proj.weight", "down_proj.weight")
        tensors, shards = dict(to_huggingface(self.decoder(seed))), []
        for name, tensor in tensors.items():
            parts = [whole_offsets(tuple(tensor.shape))]
            if axis is not None and name.endswith(cut):
                ends = [size // 2 if i == axis else size for i, size in enumerate(tensor.shape)]
                parts = [ShardOffsets((0, 0), tuple(ends)), ShardOffsets(tuple(end if i == axis else 0 for i, end in enumerate(ends)), tuple(tensor.shape))]
            shards += [WeightShard(name, tuple(tensor.shape), part, tensor.dtype, lambda t=tensor, part=part: t[part.slices]) for part in parts]
        self.writer.publish(place_shards(alone().world, shards, list(tensors), engine_layout=self.compute.layout), WeightVersion(1, step))

    def llm(self, folder: Path, **options: Any) -> LLM:
        dtype = str(self.compute.dtype).removeprefix("torch.")
        return LLM(str(folder), skip_tokenizer_init=True, kernels=self.compute.kernels, dtype=dtype, max_num_seqs=4, kv_cache_tokens=1024, **options)

    def engine(self) -> LLM:
        return self.llm(self.folder / "model", load_format="dummy")

    def expected(self, seed: int) -> list[Any]:
        folder = self.folder / f"model-{seed}"
        if not folder.exists():
            save_model(self.decoder(seed), folder)
        return tokens(self.llm(folder))

    def close(self) -> None:
        self.store.close()
        self.writer.close()
        self.buffers.close()


def tokens(llm: LLM) -> list[Any]:
    return [[(one.token_ids, one.raw_logprobs) for one in answer.outputs] for answer in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    kind, compute = getattr(request, "param", ("qwen3", PANELS))
    made = Pod(tmp_path, kind, compute=compute)
    yield made
    made.close()


@pytest.mark.parametrize("pod", [*((kind, PANELS) for kind in TRAITS), ("qwen2", ROWS[0]), ("odd", ROWS[0]), ("qwen3", ROWS[1])], indirect=True, ids=str)
def test_an_engine_draws_the_same_from_shared_weights_as_from_its_own_version_after_version(pod: Pod) -> None:
    llm = pod.engine()
    for step, seed in enumerate((1, 2, 1)):
        pod.publish(seed, step)
        updated = llm.update_weights_from(pod.source, WeightVersion(1, step))
        assert llm.engine.shares_weights and updated.rereads == ()
        assert tokens(llm) == pod.expected(seed) if step < 2 else tokens(llm)
    llm.close()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("pod", [("qwen3", PANELS), ("llama", ROWS[0])], indirect=True, ids=str)
def test_matrices_in_parts_of_rows_or_columns_are_whole_for_an_engine_that_shares(pod: Pod, axis: int) -> None:
    """A part of columns is no run of rows where it is published."""
    pod.publish(1, 0, axis)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    assert llm.engine.shares_weights and tokens(llm) == pod.expected(1)
    llm.close()


@pytest.mark.parametrize("pod", [("qwen3", compute) for compute in ROWS], indirect=True, ids=str)
def test_matrices_in_rows_are_taken_where_they_are(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    (segment,) = (each for each in pod.buffers.segments if each.contents is not None)
    start = llm.engine._shared.tensors["model.embed_tokens.weight"].data_ptr()  # The first of the segment.
    held = [*packed_tensors(llm.engine.decoder)]
    # Norms and biases of a stack alone may be put together.
    assert [name for name, tensor in held if tensor.dim() == 2 and not start <= tensor.data_ptr() < start + segment.size_bytes] == []
    assert sum(tensor.dim() == 2 for _, tensor in held) == 2 * 4 + 2, "the matrices of two layers, the embedding and the head"
    llm.close()


def test_an_engine_that_does_not_share_gets_the_same_weights_from_the_same_publication(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(WeightSource(pod.source.store), WeightVersion(1, 0))
    assert not llm.engine.shares_weights and tokens(llm) == pod.expected(1)
    pod.publish(2, 1)
    llm.update_weights_from(pod.source, WeightVersion(1, 1))
    shared = tokens(llm)
    assert llm.engine.shares_weights and shared == pod.expected(2)
    pod.publish(1, 2)
    llm.update_weights_from(WeightSource(pod.source.store), WeightVersion(1, 2))
    assert not llm.engine.shares_weights and tokens(llm) == pod.expected(1), "it has plain weights of its own again"
    llm.close()


def test_what_an_engine_drew_from_memory_that_was_written_to_never_leaves_it(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    pod.publish(2, 1)
    assert tokens(llm) == pod.expected(1), "the next version is written beside"
    pod.publish(3, 2)
    with pytest.raises(EngineDied, match=r"step 0.*written to"):
        llm.generate(PROMPTS, PARAMS)
    llm.close()


def test_a_bit_that_flips_while_the_engine_computes_is_in_the_digests_of_what_it_holds(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    (before,) = llm.engine.held_digests()
    segment = next(each for each in pod.buffers.segments if each.contents is not None)
    segment.memory[9] ^= 1  # The embedding, which is the head.
    (after,) = llm.engine.held_digests()
    assert [name for name in before if before[name] != after[name]] == ["layers.2.head.data"]
    with pytest.raises(DamagedWeights, match="embed_tokens"):
        llm.update_weights_from(pod.source, WeightVersion(1, 0))
    llm.close()


def test_a_sleeping_engine_lets_go_of_shared_weights_and_takes_the_next(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    llm.engine.sleep(level=2)
    assert not llm.engine.shares_weights
    pod.publish(2, 1)
    llm.update_weights_from(pod.source, WeightVersion(1, 1))
    llm.engine.wake_up()
    assert llm.engine.shares_weights and tokens(llm) == pod.expected(2)
    llm.close()


def test_rows_of_a_packed_table_are_its_rows() -> None:
    kernels, table = select("cpu"), torch.randn(150, 37)
    packed, rows = kernels.pack(table), torch.tensor([0, 149, 63, 64, 127, 128, 5, 5])
    assert torch.equal(kernels.packed_rows(rows, packed), table[rows])
    assert torch.equal(select("reference").packed_rows(rows, PackedWeight(table, 150, 37)), table[rows])
    for bad in (-1, 150):
        with pytest.raises(IndexError):
            kernels.packed_rows(torch.tensor([0, bad]), packed)


OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_engine_adopted import Pod
pod = Pod(Path({folder!r}), "qwen3", {size}, {hidden})
pod.publish(1, 0)
print("published", flush=True)
sys.stdin.read()
"""


def test_an_engine_has_no_private_copy_and_goes_on_when_the_owner_of_the_memory_is_killed(tmp_path: Path) -> None:
    hidden, size = 512, 1 << 25
    script = OWNER.format(tests=str(Path(__file__).parent), folder=str(tmp_path), size=size, hidden=hidden)
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "published\n"
    weights = sum(t.nbytes for _, t in to_huggingface(decoder_of("qwen3", 1, hidden)))
    taken = LLM(str(tmp_path / "model"), load_format="dummy", skip_tokenizer_init=True, kernels="cpu", max_num_seqs=4, kv_cache_tokens=1024)
    before = private_bytes()
    taken.update_weights_from(WeightSource(str(tmp_path / "store.sqlite"), shares=True), WeightVersion(1, 0))
    release(torch.device("cpu"))
    # Its dummy weights are gone, and nothing took their place.
    assert taken.engine.shares_weights and private_bytes() < before - 0.8 * weights
    first = tokens(taken)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert tokens(taken) == first
    with pytest.raises(PeerDied, match="shim has ended"):
        taken.update_weights_from(WeightSource(str(tmp_path / "store.sqlite"), opening=1, shares=True), WeightVersion(1, 0))
    assert tokens(taken) == first, "the old weights stay"
    taken.close()


def private_bytes() -> int:
    """The bytes of this process that it shares with no other."""
    lines = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024
