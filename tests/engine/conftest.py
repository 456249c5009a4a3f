"""Tiny random models in Hugging Face folders."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.llm import LLM
from tandem.kernels import select
from tandem.layout.expert_shapes import CHOICE_BIAS, ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.decoder import Decoder
from tandem.model.families import gpt_oss, mixtral, qwen2_moe
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.text.characters import make_character_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
VOCABULARY = len(CHARACTERS) + 3
TRAITS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True, "qk_norm": True},
    "qwen3_moe": {"tie_word_embeddings": True, "qk_norm": True, "experts": ExpertShapes(6, 2, 40)},
    "qwen2_moe": {
        "tie_word_embeddings": False, "attention_bias": True,
        "experts": ExpertShapes(6, 2, 40, normalised=False, names=qwen2_moe.NAMES, shared_intermediate_size=48, shared_gate=True),
    },
    "qwen3_next": {
        "tie_word_embeddings": False, "qk_norm": True, "rotary_fraction": 0.5, "norms_from_one": True, "attention_gate": True,
        "linear_attention": LinearAttention((0,), 2, 4, 12, 10, 4), "experts": ExpertShapes(
            6, 2, 40, names=qwen2_moe.NAMES, shared_intermediate_size=48, shared_gate=True
        ),
    },
    "glm4_moe": {
        "tie_word_embeddings": False, "rotary_fraction": 0.5, "qk_norm": True,
        "experts": ExpertShapes(8, 3, 40, dense_layers=(0,), shared_intermediate_size=80, sigmoid=SigmoidRouting(4, 2, 1.7)),
    },
    "gpt_oss": {
        "tie_word_embeddings": False, "attention_bias": True, "output_bias": True, "layer_windows": (20, None), "activation": "clamped_swiglu",
        "attention_sinks": True, "experts": ExpertShapes(6, 2, 48, names=gpt_oss.NAMES, biased=True),
    },
    "deepseek_v3": {
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 24, "latent": LatentAttention(24, 16, 8, 12, 20), "rotary_interleaved": True,
        "rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3), "attention_bias": True,
        "output_bias": True, "experts": ExpertShapes(8, 3, 40, dense_layers=(0,), shared_intermediate_size=40, sigmoid=SigmoidRouting(4, 2, 1.7)),
    },
    "deepseek_v2": {
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 24, "latent": LatentAttention(24, 16, 8, 12), "rotary_interleaved": True,
        "experts": ExpertShapes(8, 3, 40, normalised=False, dense_layers=(0,), shared_intermediate_size=40, softmax=SoftmaxRouting(4, 2, 1.7)),
    },
    "mistral": {"tie_word_embeddings": False, "layer_windows": (20, 20)},
    "gemma2": {
        "tie_word_embeddings": True, "layer_windows": (20, None), "post_norms": True, "activation": "gelu_pytorch_tanh", "norms_from_one": True,
        "scaled_embedding": True, "score_cap": 2.0, "logit_cap": 5.0,
    },
    "cohere": {
        "tie_word_embeddings": True, "qk_norm": True, "qk_norm_by_head": True, "centred_norms": True, "parallel_blocks": True, "rotary_interleaved": True,
        "rope_theta": 5e5, "multipliers": Multipliers(logits_scaling=4.0),
    },
    "granite": {"tie_word_embeddings": True, "multipliers": Multipliers(3.0, 0.22, 0.3, 0.8)},
    "olmo2": {"tie_word_embeddings": False, "qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True},
    "phi3": {"tie_word_embeddings": False},
    "smollm3": {"tie_word_embeddings": True, "layer_windows": (None, 20), "unrotated_layers": (1,)},
    "mixtral": {"tie_word_embeddings": False, "experts": ExpertShapes(4, 2, 48, names=mixtral.NAMES)},
}


def shapes_of(architecture: str) -> ModelShapes:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "max_position_embeddings": 128,
    }  # fmt: skip
    return ModelShapes(architecture=architecture, **{**sizes, **TRAITS[architecture]})


def random_decoder(architecture: str, seed: int) -> Decoder:
    """Returns a model with large random weights, whose peaked distributions make a wrong token visible."""
    decoder = Decoder(shapes_of(architecture), select("reference"))
    initialise(decoder, seed)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if name.endswith(CHOICE_BIAS):
                tensor.copy_(torch.linspace(-0.2, 0.2, len(tensor)))
            elif decoder.shapes.attention_sinks and name.endswith((".bias", ".sinks")):
                tensor.copy_(torch.linspace(-0.3, 0.8, len(tensor)))
            elif name.endswith(("A_log", "dt_bias")):
                tensor.copy_(torch.linspace(-3.0, 1.0, len(tensor)))
            elif not name.endswith("norm.weight"):
                tensor.mul_(10 if "proj" in name else 3)
            elif decoder.shapes.norms_from_one and ".linear_attn." not in name:
                tensor.copy_(torch.linspace(-0.3, 0.3, len(tensor)))
    return decoder


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_folder(architecture, seed)`` returns the folder of a random model, created once for the same arguments."""
    made: dict[tuple[str, int], Path] = {}
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(CHARACTERS, tokenizer)

    def make(architecture: str = "qwen3", seed: int = 0) -> Path:
        if (architecture, seed) not in made:
            folder = tmp_path_factory.mktemp("models") / f"{architecture}-{seed}"
            save_model(random_decoder(architecture, seed), folder, tokenizer)
            made[architecture, seed] = folder
        return made[architecture, seed]

    return make


@pytest.fixture
def make_llm(make_folder: Callable[..., Path]) -> Callable[..., LLM]:
    """``make_llm(architecture, seed, **engine settings)`` returns an engine. The draft model of a ``speculative_config`` may be given by its seed;
    batches of any size speculate. The keys and values of a token take 512 bytes in fp32, so a ``swap_space`` of 2**-12 GiB holds 512 tokens."""

    def make(architecture: str = "qwen3", weights: int = 0, **settings: Any) -> LLM:
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **settings}
        speculative = settings.get("speculative_config")
        if speculative is not None:
            model = speculative.get("model")
            found = {"model": make_folder(architecture, model)} if isinstance(model, int) else {}
            settings["speculative_config"] = {"disable_by_batch_size": 64, **speculative, **found}
        return LLM(make_folder(architecture, weights), **settings)

    return make


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., LLM]]:
    """``ranks(folder, **engine settings)`` returns an engine of two tensor-parallel ranks, started once for the same arguments."""
    made: dict[str, LLM] = {}

    def make(folder: Path, **settings: Any) -> LLM:
        key = f"{folder} {sorted(settings.items())}"
        if key not in made:
            made[key] = LLM(folder, **{"max_num_seqs": 16, "max_num_batched_tokens": 64, "tensor_parallel_size": 2, **settings})
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="module")
def matrix_folders(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of ``engine_matrix``, the same in AWQ, the draft model and the new weights."""
    plain, awq = make_folder("qwen3", 0), tmp_path_factory.mktemp("matrix") / "awq"
    tokens = list(torch.randint(0, 40, (4, 64), generator=torch.Generator().manual_seed(0)))
    quantize_folder(plain, awq, QuantizeOptions("awq", group_size=32), select("reference"), tokens, lambda *at: None)
    return {"plain": plain, "awq": awq, "draft": make_folder("qwen3", 2), "new": make_folder("qwen3", 1)}
