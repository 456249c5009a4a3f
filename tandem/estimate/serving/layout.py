"""How a model is served on GPUs, as the planner scores it. Imports no torch."""

from dataclasses import dataclass

from tandem.config.engine import EngineArgs
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.serving.kernels import PUBLISHED
from tandem.estimate.serving.weight_formats import Quantization, format_named
from tandem.layout.quantizable import cache_cannot, cannot
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError
from tandem.types.kv_cache import KV_CACHE_DTYPES, KVCacheDtype


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """One engine. ``tensor``: its GPUs. ``quantization``: of the weights. ``max_num_seqs``, ``max_num_batched_tokens``, ``gpu_memory_utilization``,
    ``max_model_len`` (0: the model's context) and ``kv_cache_dtype``: the engine's options. ``host_s`` and ``host_sequence_s``: what the host adds to a step
    and for each sequence in it (``serving.host``), where it is not hidden behind the GPU. ``kernels``: whose (``serving.kernels``)."""

    tensor: int = 1
    quantization: Quantization = "bf16"
    kv_cache_dtype: KVCacheDtype = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    max_model_len: int = 0
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    kernels: str = PUBLISHED

    def engine_args(self) -> EngineArgs:
        """Returns the options of the engine."""
        return EngineArgs(
            tensor_parallel_size=self.tensor, kv_cache_dtype=self.kv_cache_dtype, max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens, gpu_memory_utilization=self.gpu_memory_utilization,
        )  # fmt: skip

    def check(self, shapes: ModelShapes, hardware: Hardware) -> None:
        """Raises ``UserError`` for what neither the model nor the GPU allows."""
        precision = format_named(self.quantization).multiplies_in
        if precision not in hardware.peak_flops:
            raise UserError(f"quantization '{self.quantization}' multiplies in {precision}, which {hardware.name} has not; choose awq, int8 or fp16")
        if (reason := cannot(shapes, self.quantization)) is not None:
            raise UserError(f"quantization is '{self.quantization}', and the model has {reason}; choose gptq, int8 or fp8")
        if self.tensor < 1 or shapes.num_attention_heads % self.tensor:
            raise UserError(f"tensor parallel size is {self.tensor}; it must divide the model's {shapes.num_attention_heads} attention heads")
        if (linear := shapes.linear_attention) is not None and linear.num_key_heads % self.tensor:
            raise UserError(f"tensor parallel size is {self.tensor}; it must divide the {linear.num_key_heads} key heads of the model's linear attention")
        if self.tensor > 1 and shapes.qk_norm_all_heads:
            raise UserError(f"tensor parallel size is {self.tensor}; the model's norms of queries and keys are over all heads: leave it at 1")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UserError(f"kv_cache_dtype is '{self.kv_cache_dtype}'; it must be one of {', '.join(KV_CACHE_DTYPES)}")
        if (reason := cache_cannot(shapes, self.kv_cache_dtype)) is not None:
            raise UserError(f"kv_cache_dtype is '{self.kv_cache_dtype}', {reason}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if not 1 <= getattr(self, name) <= 2**20:
                raise UserError(f"{name} is {getattr(self, name)}; it must be from 1 to {2**20}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0, at most 1")
