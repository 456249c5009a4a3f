"""Adapters chosen by requests, in every listed family: two of them and plain requests in one batch, against transformers in float64 with merged weights."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_families import Tiny
from safetensors.torch import load_file
from torch import Tensor

from tandem import LLM, LoRARequest, SamplingParams
from tandem.config.lora import ATTENTION_MODULES, LATENT_MODULES, LINEAR_ATTENTION_MODULES, MLP_MODULES, LoraConfig
from tandem.layout.latent_attention import WITHIN_HEADS
from tandem.layout.parameters import is_of_adapter, parameters
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.peft_folder import PREFIX, save_adapter

SCALE = 2.0
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that some families of transformers have as one, by rows."""
PROMPTS = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 21, 21, 2, 34)]
"""The first three are the same, so that a block of one adapter in the prefix cache would be seen with the other or without."""
CHOSEN = (1, None, 2, 2, 1)
"""The adapter of each prompt."""
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def write_adapter(tiny: Tiny, folder: Path, seed: int) -> LoRARequest:
    """Writes a random adapter of every matrix that requests may change."""
    shapes, generator = read_shapes(tiny.folder), torch.Generator().manual_seed(seed)
    own = {name.split(".")[-2] for name, _ in parameters(shapes)} - {WITHIN_HEADS}
    known = (*ATTENTION_MODULES, *LATENT_MODULES, *LINEAR_ATTENTION_MODULES, *(MLP_MODULES if shapes.experts is None else ()))
    lora = LoraConfig(3, 3 * SCALE, target_modules=tuple(name for name in known if name in own))
    adapted = replace(shapes, lora=lora)
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in parameters(adapted) if is_of_adapter(name)}
    save_adapter(tensors, adapted, folder, tiny.folder)
    return LoRARequest(folder.name, seed, str(folder))


def merged(tiny: Tiny, adapter: LoRARequest | None) -> Any:
    """Returns the model of transformers in float64 with W + scale B A in place of each adapted W."""
    peer = copy.deepcopy(tiny.peer).double()
    if peer._can_set_experts_implementation():
        # The others have no float64.
        peer.set_experts_implementation("eager")
    if adapter is None:
        return peer
    factors = {name.removeprefix(PREFIX): tensor.double() for name, tensor in load_file(f"{adapter.lora_path}/adapter_model.safetensors").items()}
    changes = {name.partition(".lora_A")[0]: SCALE * factors[name.replace("lora_A", "lora_B")] @ a for name, a in factors.items() if ".lora_A" in name}
    assert len(changes) >= 4
    for name, module in peer.named_modules():
        parent, _, leaf = name.rpartition(".")
        parts: list[Tensor] = [changes.pop(f"{parent}.{part}") for part in FUSED.get(leaf, (leaf,)) if f"{parent}.{part}" in changes]
        if parts:
            with torch.no_grad():
                module.weight += torch.cat(parts)
    assert not changes, f"transformers has no {sorted(changes)}"
    return peer


def test_requests_with_two_adapters_and_without_get_what_transformers_computes_with_merged_weights(tiny: Tiny, tmp_path: Path) -> None:
    adapters: dict[int | None, LoRARequest | None] = {None: None, **{seed: write_adapter(tiny, tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)}}
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 80, "max_num_seqs": 8, "max_num_batched_tokens": 23}
    with LLM(str(tiny.folder), enable_lora=True, max_loras=2, max_lora_rank=4, **settings) as llm:
        together = [answer.outputs[0] for answer in llm.generate(prompts, GREEDY, lora_request=[adapters[chosen] for chosen in CHOSEN])]
        for key, chosen in enumerate(CHOSEN):
            assert llm.generate(prompts[key], GREEDY, lora_request=adapters[chosen])[0].outputs == [together[key]], "alone"
        llm.engine.check_integrity()
    with LLM(str(tiny.folder), **settings) as llm:
        assert llm.generate(prompts[1], GREEDY)[0].outputs == [together[1]], "by an engine without adapters"
    scored = [torch.tensor(output.raw_logprobs) for output in together[:3]]
    assert min((a - b).abs().max() for a, b in itertools.combinations(scored, 2)) > 1e-2, "each adapter changes the model"
    peers = {chosen: merged(tiny, adapter) for chosen, adapter in adapters.items()}
    for prompt, chosen, output in zip(PROMPTS, CHOSEN, together, strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            scores = peers[chosen](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == scores.argmax(-1).tolist()
        assert list(output.raw_logprobs) == pytest.approx(scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=1e-4)
