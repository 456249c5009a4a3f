"""A mixture of experts on real vLLM: its tokens, weights and recorded routing against transformers in float64."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import GREEDY, SAMPLED, Engine, brought, digest_of, engine_core, flip_in_memory, needs_vllm, prompts, running
from torch import Tensor, nn

from tandem.config.model import NewModelConfig
from tandem.jobs.weights_check.layouts import LayoutPair
from tandem.jobs.weights_check.pair import PairCheck
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import EngineDied, Sample

pytestmark = [pytest.mark.full, needs_vllm]
LAYERS, EXPERTS, EACH = 2, 8, 2


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, sizes = tmp_path_factory.mktemp("models") / request.param, {"moe_intermediate_size": 96} if request.param == "qwen3_moe" else {}
    create_model(
        NewModelConfig(
            architecture=request.param, hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=96, head_dim=32, num_attention_heads=2,
            num_experts=EXPERTS, num_experts_per_tok=EACH, initializer_range=0.1, **sizes,
        ), 0, folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(model, tmp_path_factory.mktemp("vllm"), returns_routing=True) as started:
        yield started


def recorded(sample: Sample) -> Tensor:
    """The experts [tokens, layers, each] that vLLM recorded."""
    routed = sample.routed_experts
    assert routed is not None and (routed.layers, routed.experts_per_token, routed.item_bytes) == (LAYERS, EACH, 1)
    experts = torch.tensor(list(routed.data)).view(-1, LAYERS, EACH)
    assert len(experts) == len(sample.prompt_token_ids) + len(sample.token_ids) - 1
    return experts


def reference(model: Path, tensors: dict[str, Tensor]) -> nn.Module:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = model.parent / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    network.set_experts_implementation("eager")
    return network


def router_logits(network: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """The router's logits [tokens, layers, experts] in float64 of the tokens before the last, and the log-probabilities of those drawn."""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(nn.functional.linear(inputs[0], module.weight)))
        for layer in network.model.layers
    ]
    with torch.no_grad():
        logits = network(torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])).logits[0, len(sample.prompt_token_ids) - 1 : -1]
    for hook in hooks:
        hook.remove()
    return torch.stack([each.view(-1, EXPERTS) for each in seen], 1)[:-1], logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def test_tokens_logprobs_and_routing_are_those_of_transformers_after_each_update(engine: Engine, model: Path) -> None:
    asked = prompts(8, 99)
    for step in (0, 1):
        network = reference(model, brought(engine, model, step, seed=step))
        # The second time prompts are in the prefix cache, and their routing has to come from beside it.
        samples = engine.draw(asked, GREEDY) + engine.draw(asked, SAMPLED) + engine.draw(asked, SAMPLED)
        places = ties = 0
        for sample in samples:
            logits, logprobs = router_logits(network, sample)
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - logprobs).abs().max() < 1e-4
            chosen = logits.gather(2, recorded(sample))
            expected = logits.topk(EACH).values
            places += chosen.shape[0] * LAYERS
            # Of two experts whose logits are the same up to the rounding of fp32 either may be chosen.
            assert (chosen.sort(-1, descending=True).values - expected).abs().max() < 1e-4
            ties += int((chosen.sort(-1, descending=True).values != expected).any(-1).sum())
        assert places > 1000 and ties <= places // 100
        assert len({bytes(sample.routed_experts.data) for sample in samples if sample.routed_experts}) > 8


def test_experts_are_held_bit_for_bit_and_a_flipped_bit_is_named_and_repaired(engine: Engine, model: Path) -> None:
    for step in (30, 31):
        tensors = brought(engine, model, step, seed=step)
        (held,) = engine.server.held_digests()
        experts = [name for name in tensors if "experts." in name or name.endswith("gate.weight")]
        assert len(experts) == LAYERS * (EXPERTS * 3 + 1)
        assert all(held[name] == digest_of(tensors[name]) for name in experts)
    for name in experts[:: len(experts) // 5]:
        # Packed: neighbours are the outputs of one input.
        assert flip_in_memory([engine_core(engine)], tensors[name][:8, 3].tolist()) > 0, f"{name}: not found in vLLM's memory"
        with pytest.raises(EngineDied) as raised:
            engine.server.check_held()
        assert f"'{name}'" in str(raised.value)
        step += 1
        tensors = brought(engine, model, step, seed=step)
        engine.server.check_held()


def test_weights_of_random_numbers_reach_vllm_as_its_own_loaders_read_them(model: Path, tmp_path: Path) -> None:
    """``tandem weights check``: two versions from the ranks of a trainer; what vLLM holds after each is what it holds when it has read the folder."""
    check = PairCheck(LayoutPair("tensor=2", "backend=vllm"), model, tmp_path, threads=1, on_step=lambda step: None)
    report = check.run()
    assert report.found == ()
    # Both versions, each with all tensors, the packed head and the table of rotary embeddings.
    assert report.tensors == len(dict(read_tensors(model))) and report.digests > 2 * report.tensors


def test_a_routing_is_whole_where_requests_are_preempted_and_prompts_begin_alike(model: Path, tmp_path: Path) -> None:
    """The cache has 32 blocks of 32 tokens. Prompts of 24 tokens begin with a block each and grow into a second, for which there is no room; the others have
    their first block in common."""
    common = (prompts(1, 99, longest=50, seed=8)[0].token_ids * 20)[:32]
    rest = prompts(60, 99, longest=18, seed=9)
    short = [replace(prompt, id=f"short {prompt.id}", token_ids=(prompt.token_ids * 24)[:24]) for prompt in rest[:30]]
    alike = [replace(prompt, token_ids=common + prompt.token_ids) for prompt in rest[30:]]
    with running(model, tmp_path / "vllm", returns_routing=True, cache_bytes=2**20) as engine:
        brought(engine, model, 50, seed=50)
        samples = engine.draw(short + alike, {**SAMPLED, "max_tokens": 14})
    assert len(samples) == 240
    experts = [recorded(sample) for sample in samples]
    assert all(int(each.max()) < EXPERTS and (each[..., 0] != each[..., 1]).all() for each in experts)
    firsts = torch.stack([each[:32].sort(-1).values for each in experts[120:]])
    different = (firsts != firsts[0]).any(-1).sum()
    assert different <= firsts[..., 0].numel() // 100, "the routing of a shared block is not that of the tokens in it"
