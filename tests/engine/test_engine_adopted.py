"""An engine computes with published weights where they are, without a copy: the same tokens and log-probabilities, and no memory of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from published_pod import PANELS, PARAMS, PROMPTS, ROWS, TRAITS, Pod, decoder_of, tokens

from tandem import LLM
from tandem.kernels import select
from tandem.kernels.api import PackedWeight
from tandem.model.huggingface.model_folder import to_huggingface
from tandem.model.weight_digests import packed_tensors
from tandem.pod.release import release
from tandem.runtime.rpc.calls import PeerDied
from tandem.types import DamagedWeights, EngineDied, WeightSource, WeightVersion
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.sharing import packed_privately


@pytest.fixture
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    kind, compute = getattr(request, "param", ("qwen3", PANELS))
    made = Pod(tmp_path, kind, compute=compute)
    yield made
    made.close()


@pytest.mark.parametrize(
    "pod",
    [
        *((kind, PANELS) for kind in TRAITS), ("qwen3", ROWS[1]),
        *(pytest.param((kind, ROWS[0]), marks=pytest.mark.full) for kind in ("qwen2", "odd", "mixtral")),
    ],
    indirect=True, ids=str,
)  # fmt: skip
def test_an_engine_draws_the_same_from_shared_weights_as_from_its_own_version_after_version(pod: Pod) -> None:
    llm = pod.engine()
    for step, seed in enumerate((1, 2, 1)):
        pod.publish(seed, step)
        updated = llm.update_weights_from(pod.source, WeightVersion(1, step))
        assert llm.engine.shares_weights and updated.rereads == ()
        assert tokens(llm) == pod.expected(seed) if step < 2 else tokens(llm)
    llm.close()


@pytest.mark.parametrize("pod", [("halves", PANELS), ("halves_of_experts", PANELS), ("mixtral", ROWS[0])], indirect=True, ids=str)
def test_an_engine_packs_no_matrix_that_is_published_as_it_needs_it(pod: Pod) -> None:
    pod.publish(1, 0)
    llm = pod.engine()
    llm.update_weights_from(pod.source, WeightVersion(1, 0))
    assert pod.private_matrices(llm) == []
    llm.close()


RANKS = [
    ("halves_of_experts", []),
    # Two ranks have halves of panels: of 192 rows of the table, and of every matrix but q.
    pytest.param("halves", ["layers.2.head.data"], marks=pytest.mark.full),
    pytest.param("qwen3", None, marks=pytest.mark.full),
    pytest.param("mixtral", None, marks=pytest.mark.full),
    pytest.param("odd_experts", None, marks=pytest.mark.full),
    pytest.param("gpt_oss", None, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "private"), RANKS, ids=str)
def test_an_engine_of_two_ranks_shares_and_draws_the_same_until_memory_is_damaged_or_written_to(kind: str, private: list[str] | None, tmp_path: Path) -> None:
    pod = Pod(tmp_path, kind)
    pod.publish(1, 0, 0)
    llm = pod.llm(tmp_path / "model", load_format="dummy", tensor_parallel_size=2)
    updated = llm.update_weights_from(pod.source, WeightVersion(1, 0))
    assert llm.engine.shares_weights and updated.rereads == () and tokens(llm) == pod.expected(1)
    assert private is None or pod.private_matrices(llm) == private, "what rank 0 holds beside the shared memory"
    assert private is None or len(packed_privately(llm.engine.shapes, 2)) == len(private)
    before = llm.engine.held_digests()
    pod.publish(2, 1)
    segment = next(each for each in pod.buffers.segments if each.contents is not None and each.contents.version.step == 1)
    published = current(pod.store)
    assert published is not None
    for entry in published[0].tensors:
        at = entry.offset_bytes + entry.size_bytes - 3
        if entry.name.endswith(("0.self_attn.q_proj.weight", "model.norm.weight", "1.experts.2.up_proj.weight")):
            segment.memory[at] ^= 8
            with pytest.raises(DamagedWeights, match=entry.name):
                llm.update_weights_from(pod.source, WeightVersion(1, 1))
            segment.memory[at] ^= 8
            assert llm.engine.held_digests() == before and llm.engine.shares_weights, "no rank has changed"
    llm.update_weights_from(pod.source, WeightVersion(1, 1))
    assert tokens(llm) == pod.expected(2)
    pod.publish(1, 2)
    pod.publish(1, 3)
    with pytest.raises(EngineDied, match=r"step 1.*written to"):
        llm.generate(PROMPTS, PARAMS)
    llm.update_weights_from(WeightSource(pod.source.store), WeightVersion(1, 3))
    assert not llm.engine.shares_weights and tokens(llm) == pod.expected(1), "its ranks have plain weights of their own again"
    llm.close()
    pod.close()


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
    start = llm.engine._published.shared.tensors["model.embed_tokens.weight"].data_ptr()  # The first of the segment.
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
