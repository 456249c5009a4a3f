"""The shared memory of a pod with what a trainer publishes, and engines that take it."""

import uuid
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem import LLM, SamplingParams
from tandem.kernels import KernelChoice, select
from tandem.layout.expert_shapes import STANDARD_NAMES, ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.decoder import Decoder
from tandem.model.families.gpt_oss import NAMES as GPT_OSS
from tandem.model.families.mixtral import NAMES as MIXTRAL
from tandem.model.families.qwen2_moe import NAMES as QWEN2_MOE
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.weight_digests import packed_tensors
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightSource, WeightVersion
from tandem.types.weights import Layout
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import whole_offsets
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5], list(range(3, 20)), [7] * 16)]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=11, temperature=0.9, ignore_eos=True)
HALVES: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
TRAITS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"tie_word_embeddings": True, "qk_norm": True},
    "olmo2": {"tie_word_embeddings": False, "qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True},
    # Norms whose 16 rows could be panels are none.
    "cohere": {
        "tie_word_embeddings": True, "num_attention_heads": 16, "num_key_value_heads": 16, "qk_norm": True, "qk_norm_by_head": True, "centred_norms": True,
        "parallel_blocks": True, "rotary_interleaved": True,
    },
    "gemma2": {
        "tie_word_embeddings": True, "post_norms": True, "activation": "gelu_pytorch_tanh", "norms_from_one": True, "scaled_embedding": True, "score_cap": 2.0,
        "logit_cap": 5.0,
    },
    "qwen2_moe": {
        "tie_word_embeddings": False, "attention_bias": True,
        "experts": ExpertShapes(16, 2, 64, normalised=False, dense_layers=(1,), names=QWEN2_MOE, shared_intermediate_size=80, shared_gate=True),
    },
    "glm4_moe": {
        "tie_word_embeddings": False, "rotary_fraction": 0.5, "qk_norm": True,
        "experts": ExpertShapes(16, 2, 64, dense_layers=(0,), shared_intermediate_size=64, sigmoid=SigmoidRouting(4, 2, 1.7)),
    },
    "gpt_oss": {
        "tie_word_embeddings": False, "attention_bias": True, "output_bias": True, "activation": "clamped_swiglu", "attention_sinks": True,
        "intermediate_size": 64, "experts": ExpertShapes(16, 2, 64, names=GPT_OSS, biased=True),
    },
    "deepseek_v3": {
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 48, "latent": LatentAttention(64, 32, 16, 32, 64), "rotary_interleaved": True,
        "attention_bias": True, "output_bias": True,
        "experts": ExpertShapes(16, 2, 64, dense_layers=(0,), shared_intermediate_size=64, sigmoid=SigmoidRouting(4, 2, 1.7)),
    },
    "deepseek_v2": {
        "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 48, "latent": LatentAttention(64, 32, 16, 32), "rotary_interleaved": True,
        "experts": ExpertShapes(16, 2, 64, normalised=False, dense_layers=(0,), shared_intermediate_size=64, softmax=SoftmaxRouting(4, 2, 1.7)),
    },
    # Experts of whole panels, a router in panels (16 experts) and one that is not, a layer without experts, and tensors with other names.
    "qwen3_moe": {"tie_word_embeddings": False, "qk_norm": True, "experts": ExpertShapes(16, 2, 64)},
    "dense_layers": {"architecture": "qwen3_moe", "tie_word_embeddings": True, "qk_norm": True, "experts": ExpertShapes(3, 2, 128, dense_layers=(1,))},
    "mixtral": {"tie_word_embeddings": False, "intermediate_size": 128, "experts": ExpertShapes(4, 2, 128, names=MIXTRAL)},
    # No panel ends where the rows of an expert's gate do: the engine packs both itself.
    "odd_experts": {"architecture": "qwen3_moe", "tie_word_embeddings": False, "qk_norm": True, "experts": ExpertShapes(3, 2, 48)},
    # Each of two ranks has whole panels of every matrix.
    "halves": {"architecture": "qwen2", "tie_word_embeddings": True, "attention_bias": True, **HALVES, "vocab_size": 192},
    "halves_of_experts": {
        "architecture": "qwen3_moe", "tie_word_embeddings": False, "qk_norm": True, **HALVES, "vocab_size": 128,
        "experts": ExpertShapes(16, 2, 128, dense_layers=(1,)),
    },
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

    def __init__(self, folder: Path, kind: str, size_bytes: int = 1 << 23, hidden: int = 32, compute: Compute = PANELS) -> None:
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
        experts = self.decoder(0).shapes.experts
        names = STANDARD_NAMES if experts is None else experts.names
        placed = place_shards(alone().world, shards, list(tensors), engine_layout=self.compute.layout, experts=names)
        self.writer.publish(placed, WeightVersion(1, step))

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

    def private_matrices(self, llm: LLM) -> list[str]:
        """The names of the matrices that the engine, or its first rank, holds in memory of its own."""
        segment = next(each for each in self.buffers.segments if each.contents is not None)
        start = llm.engine._published.shared.tensors["model.embed_tokens.weight"].untyped_storage().data_ptr()
        held = [(name, tensor) for name, tensor in packed_tensors(llm.engine.decoder) if tensor.numel() and not name.endswith(("bias", "norm.weight"))]
        assert len(held) > 8
        return [name for name, tensor in held if not start <= tensor.data_ptr() < start + segment.size_bytes]

    def close(self) -> None:
        self.store.close()
        self.writer.close()
        self.buffers.close()


def tokens(llm: LLM) -> list[Any]:
    return [[(one.token_ids, one.raw_logprobs) for one in answer.outputs] for answer in llm.generate(PROMPTS, PARAMS)]
