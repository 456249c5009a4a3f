"""Real vLLM on two tensor-parallel ranks: each holds its part of what was published bit for bit, and together they draw what transformers computes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_vllm import GREEDY, SAMPLED, Engine, alive, brought, digest_of, flip_in_memory, needs_vllm, prompts, running
from test_backends_vllm import reference_logprobs
from test_backends_vllm_experts import EACH, EXPERTS, LAYERS, recorded, reference, router_logits
from torch import Tensor

from tandem.config.model import NewModelConfig
from tandem.jobs.weights_check.layouts import LayoutPair
from tandem.jobs.weights_check.pair import PairCheck
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import EngineDied

pytestmark = [pytest.mark.full, needs_vllm]
RANKS, SHARED_MEMORY = 2, Path("/dev/shm")
SIZES = {
    # Keys and values divided, a tied head; one head of keys and values, which both ranks have, and a head of its own; a mixture of experts.
    "tied": {"architecture": "qwen3", "num_key_value_heads": 2, "intermediate_size": 192},
    "untied": {"architecture": "llama", "num_key_value_heads": 1, "intermediate_size": 192, "tie_word_embeddings": False},
    "experts": {"architecture": "qwen3_moe", "num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts": EXPERTS, "num_experts_per_tok": EACH},
}


@pytest.fixture(scope="module", params=list(SIZES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, sizes = tmp_path_factory.mktemp("models") / request.param, {"hidden_size": 96, "num_attention_heads": 4, **SIZES[request.param]}
    create_model(NewModelConfig(num_hidden_layers=LAYERS, head_dim=32, initializer_range=0.1, **sizes), 0, folder)
    return folder


def has_experts(model: Path) -> bool:
    return model.name == "experts"


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(model, tmp_path_factory.mktemp("vllm"), tensor_parallel_size=RANKS, returns_routing=has_experts(model)) as started:
        yield started


def part(name: str, tensor: Tensor, rank: int) -> Tensor:
    """What a tensor-parallel rank has by Shoeybi et al. (2019), section 3: rows of the matrices whose outputs are divided, columns of those whose inputs are,
    rows of the vocabulary, filled up to 128; norms and routers whole."""
    last = name.split(".")[-2]
    if last in ("q_proj", "gate_proj", "up_proj") or (last in ("k_proj", "v_proj") and len(tensor) > 32):
        return tensor.chunk(RANKS)[rank]
    if last in ("o_proj", "down_proj"):
        return tensor.chunk(RANKS, 1)[rank]
    if last in ("embed_tokens", "lm_head"):
        return torch.cat([tensor, torch.zeros(128 - len(tensor), tensor.shape[1])]).chunk(RANKS)[rank]
    return tensor


def test_each_rank_holds_its_part_bit_for_bit(engine: Engine, model: Path) -> None:
    for step in (0, 1):
        tensors = brought(engine, model, step, seed=step)
        held = engine.server.held_digests()
        assert len(held) == RANKS
        for rank, digests in enumerate(held):
            assert all(digests[name] == digest_of(part(name, tensor, rank).contiguous()) for name, tensor in tensors.items())
        names = [name for name in tensors if "proj" in name]
        assert sum(held[0][name] != held[1][name] for name in names) >= len(names) - 2 * LAYERS, "the ranks hold the same parts"
        engine.server.check_held()


def test_tokens_logprobs_and_routing_are_those_of_transformers(engine: Engine, model: Path) -> None:
    tensors = brought(engine, model, 10, seed=10)
    samples = engine.draw(prompts(8, 99), GREEDY) + engine.draw(prompts(8, 99), SAMPLED)
    if not has_experts(model):
        for sample, logprobs in zip(samples, reference_logprobs(model, tensors, samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
        return
    network = reference(model, tensors)
    for sample in samples:
        logits, chosen = router_logits(network, sample)
        assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
        # Of two experts whose logits are the same up to the rounding of fp32 either may be chosen.
        assert (logits.gather(2, recorded(sample)).sort(-1, descending=True).values - logits.topk(EACH).values).abs().max() < 1e-4


def test_a_bit_that_flips_in_one_ranks_memory_is_named_with_the_rank_and_repaired(engine: Engine, model: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = brought(engine, model, 20, seed=20)
    pids = [pid for pid, line in engine.processes().items() if "Worker_TP1" in line]
    assert len(pids) == 1
    # Packed: neighbours are the outputs of the same input.
    assert flip_in_memory(pids, part(name, tensors[name], 1)[:8, 3].tolist()) > 0, "not found in vLLM's memory"
    with pytest.raises(EngineDied, match=f"tensor '{name}' on rank 1 has changed"):
        engine.server.check_held()
    brought(engine, model, 21, seed=21)
    engine.server.check_held()


def test_weights_of_random_numbers_reach_each_rank_as_vllms_own_loaders_divide_them(model: Path, tmp_path: Path) -> None:
    pair = LayoutPair("tensor=2", f"backend=vllm,tensor_parallel_size={RANKS}")
    report = PairCheck(pair, model, tmp_path, threads=2, on_step=lambda step: None).run()
    assert report.found == ()
    # Of both versions and ranks.
    assert report.tensors == len(dict(read_tensors(model))) and report.digests > 2 * RANKS * report.tensors


def test_the_death_of_a_rank_ends_the_server_and_nothing_of_it_is_left(model: Path, tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir())
    with running(model, tmp_path / "vllm", tensor_parallel_size=RANKS, returns_routing=has_experts(model)) as engine:
        brought(engine, model, 0, seed=0)
        processes = engine.processes()
        (victim,) = [pid for pid, line in processes.items() if "Worker_TP1" in line]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineDied):
            engine.draw(prompts(4, 99), SAMPLED)
        ends = time.monotonic() + 60
        while alive(list(processes)) and time.monotonic() < ends:
            time.sleep(0.05)
        assert alive(list(processes)) == []
    assert not [path.name for path in SHARED_MEMORY.iterdir() if path not in before and "vllm" in path.name]
