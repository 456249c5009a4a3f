"""How a model is trained on GPUs, as the planner scores it. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.eagle3 import Eagle3Shapes

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "sp_selective", "full"]
"""What the backward pass computes again: nothing; the scores and the softmax of attention (``selective``; with ``sp_selective`` the ranks of a
tensor-parallel group also divide the tokens of the residual stream: Korthikanti et al., 2022); whole layers."""


class DraftTraining(NamedTuple):
    """A draft ``head`` that is trained for ``steps`` positions of a draft, beside a model that stays as it is."""

    head: Eagle3Shapes
    steps: int


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """``parallel``: the mesh. ``micro_batch`` and ``global_batch``: sequences of ``sequence`` tokens in a pass of one data-parallel rank, and in a step.
    ``precision``: of the products; with 16 bits and fewer, fp32 weights are held beside the rounded ones. ``offload``: where the optimizer's state is.
    ``reshard_after_forward``: with ZeRO 3, weights are gathered again for the backward pass and gradients are reduced after each; otherwise a rank keeps both
    whole for a step, as FSDP2 does in a pipeline. ``chunked_head``: logits are computed in chunks that are dropped, as Tandem's trainer does.
    ``attention``: ``fused`` in the GPU's fastest kernel that keeps no scores (``flash2``, ``flash1``: in that generation of FlashAttention), or ``unfused``,
    which writes them to memory; ``auto``: PyTorch's ``flash2`` with ZeRO 3, ``unfused`` in fp16, whose published recipes are older than fused kernels, and
    ``fused`` otherwise. ``tensor_overlap``: what hides the communication of tensor-parallel ranks: ``none``; ``backward``: the products of the gradients of
    weights; ``all``: products in parts, one of which is computed while another is sent (Wang et al., 2023); ``auto``: ``none`` with ZeRO 3, as in PyTorch, or
    without sequence parallelism, ``backward`` in fp16, and ``all`` otherwise. ``fused_elementwise``: norms, rotary embedding and activations are one kernel
    each (a compiler's or a library's), not several; ``fused_loss``: the cross-entropy is. ``reduce_precision``: of the gradients that ranks sum and hold
    (Megatron-Core's ``grad_reduce_in_fp32``). ``reduces_each_pass``: with ZeRO 3, gradients are summed after each micro-batch; otherwise they stay whole until
    the last one (FSDP2 without gradient synchronisation). ``state_precision``: of the weights that the optimizer updates and of its moments; ``bf16``: no fp32
    copy of either. ``loss_precision``: of the softmax of whole logits (``bf16``: PyTorch's cross-entropy of 16-bit logits). ``whole_vocabulary``: each
    tensor-parallel rank has the whole embedding and gathers the logits of all (PyTorch, where the embedding is replicated and the head's output is gathered
    for the loss). ``expert_dispatch``: a token travels once for each of its experts (``copies``), or ``once`` to each node and each GPU that has some of them
    (DeepEP, HybridEP). ``experts_as``: the products of each expert of a GPU are kernels of their own, whose sizes the host awaits (``each``) or knows, because
    they are padded to a capacity (``padded``), or those of all experts are one kernel (``grouped``). ``whole_experts``: the ranks of a tensor-parallel group
    have different experts, each of them whole, so that ``expert`` x ``tensor`` ranks divide the experts (Megatron-Core's ``expert_tensor_parallel_size`` of
    1: Liu et al., 2025, "MoE Parallel Folding"); otherwise they divide each. ``expert_imbalance``: tokens of the expert-parallel rank with the most over those
    of a rank on average, beyond chance; the others wait for it. ``overlaps_experts``: the exchange of a micro-batch is hidden behind the kernels of another.
    ``fp8_scaling``: of an operand, by the largest values of earlier steps (``delayed``), by its own (``current``), or by those of
    its blocks (``block``: MXFP8). ``cuda_graphs``: kernels are not started one by one.

    ``trainer``: section ``trainer`` of a recipe, whose choices Tandem's own trainer follows; ``None``: a trainer of the literature (Megatron-Core, FSDP2).
    With a ``trainer``: ``on_cpu``: ranks compute on a CPU; ``pass_tokens``: of the largest micro-batch (0: ``micro_batch`` sequences); ``attended``: with
    shared prompts, the lengths of its sequences with their prompts, since attention has keys and values of each; ``is_forked``: a rank is a process forked
    from one that has imported its modules; ``draft``: what is trained in the place of the model; ``distinct``: of the tokens of a micro-batch on a CPU, the
    share that a forward pass computes which has equal beginnings once, beside a backward pass with all of them (1: both compute every token)."""

    parallel: ParallelConfig
    sequence: int
    global_batch: int
    micro_batch: int = 1
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    offload: Literal["none", "cpu", "nvme"] = "none"
    reshard_after_forward: bool = True
    chunked_head: bool = False
    attention: Literal["auto", "fused", "flash2", "flash1", "unfused"] = "auto"
    tensor_overlap: Literal["auto", "none", "backward", "all"] = "auto"
    fused_elementwise: bool = True
    fused_loss: bool = False
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    reduces_each_pass: bool = True
    state_precision: Literal["fp32", "bf16"] = "fp32"
    loss_precision: Literal["fp32", "bf16"] = "fp32"
    whole_vocabulary: bool = False
    expert_dispatch: Literal["copies", "once"] = "copies"
    experts_as: Literal["each", "padded", "grouped"] = "each"
    whole_experts: bool = False
    expert_imbalance: float = 1.0
    overlaps_experts: bool = False
    fp8_scaling: Literal["delayed", "current", "block"] = "delayed"
    cuda_graphs: bool = False
    trainer: TrainerConfig | None = None
    on_cpu: bool = False
    pass_tokens: int = 0
    attended: int = 0
    is_forked: bool = True
    draft: DraftTraining | None = None
    distinct: float = 1.0

    @property
    def attention_kernel(self) -> Literal["fused", "flash2", "flash1", "unfused"]:
        if self.attention != "auto":
            return self.attention
        return "unfused" if self.precision == "fp16" else "flash2" if self.parallel.zero == 3 else "fused"

    @property
    def fused_attention(self) -> bool:
        return self.attention_kernel != "unfused"

    @property
    def hidden_tensor_communication(self) -> Literal["none", "backward", "all"]:
        if self.tensor_overlap != "auto":
            return self.tensor_overlap
        return "none" if self.parallel.zero == 3 or not self.shares_tokens else "backward" if self.precision == "fp16" else "all"

    @property
    def copies_collectives(self) -> bool:
        """Whether tensor-parallel ranks read and write what they gather or scatter once more: PyTorch's collectives divide the first dimension, and tokens are
        the second (torch/distributed/_functional_collectives.py, ``all_gather_tensor`` and ``reduce_scatter_tensor``). Tandem's tokens are the first."""
        return self.trainer is None and self.parallel.zero == 3 and self.hidden_tensor_communication == "none" and self.shares_tokens

    @property
    def product_bytes(self) -> int:
        """Bytes of an operand of a layer's products."""
        return 1 if self.precision == "fp8" else 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that ranks sum and hold."""
        return 2 if self.reduce_precision == "bf16" else 4

    @property
    def gpus(self) -> int:
        return self.parallel.world

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide the experts of a layer among them."""
        return self.parallel.expert * (self.parallel.tensor if self.whole_experts else 1)

    @property
    def expert_tensor(self) -> int:
        """Ranks that divide each expert."""
        return 1 if self.whole_experts else self.parallel.tensor

    @property
    def micro_batches(self) -> int:
        """Passes of one data-parallel rank in a step."""
        return self.global_batch // (self.parallel.data * self.micro_batch)

    @property
    def shares_tokens(self) -> bool:
        """Whether tensor-parallel ranks divide the tokens of the residual stream (sequence parallelism)."""
        return self.parallel.tensor > 1 and self.parallel.sequence_parallel


def layout_of_trainer(
    trainer: TrainerConfig, parallel: ParallelConfig, tokens: int, *, attended: int = 0, on_cpu: bool = True, micro_batches: int = 0, is_forked: bool = True
) -> TrainingLayout:
    """Returns the layout of ranks of Tandem's own trainer, whose largest micro-batch has ``tokens`` tokens. ``micro_batches``: of one data-parallel rank in a
    step (0: several, and enough to fill the pipeline)."""
    passes = micro_batches or max(2, parallel.pipeline * parallel.virtual_stages)
    return TrainingLayout(
        parallel, max(tokens, 1), parallel.data * passes, 1, trainer.multiplies_in, trainer.recompute, trainer.offload, chunked_head=True, trainer=trainer,
        on_cpu=on_cpu, pass_tokens=tokens, attended=attended, is_forked=is_forked,
    )  # fmt: skip
