"""Kernels that a GPU awaits from its host: their number in a layer, and the seconds for which the GPU has nothing to compute. Imports no torch.

A framework without CUDA graphs starts each kernel from Python. The host runs ahead of the GPU, so that a layer waits only if all its kernels together take
less time than it takes to start them. A mixture of experts without a capacity limit cannot run ahead: the numbers of tokens of the experts, which the next
shapes depend on, are read back from the GPU, and the products of each expert are a kernel of their own (Transformer Engine's ``GroupedLinear`` up to 2.14).
"""

from tandem.estimate.training.layout import TrainingLayout

START_S = 22e-6
"""Seconds of a host to start a kernel of a training framework: a step of Megatron-Core on GH200s became 25.66 - 22.01 s shorter when 163,840 products of
single experts became 1,280 grouped ones (github.com/GeodesicResearch/geodesic-megatron, docs/investigations/120b-gbs64-host-overhead-investigation.md, section
9). The cost of the call in CUDA is 2 to 5 us of it."""
FUSED_KERNELS, EAGER_KERNELS = 8, 30
"""Elementwise kernels of a layer forward, of a compiler or a library and of eager PyTorch; a backward pass has twice as many."""
ROUTING_KERNELS = 20
"""Of a mixture forward: the router's softmax, choice and counts, two permutations there and back, and two exchanges (Megatron-Core,
``MoEAlltoAllTokenDispatcher``). With the others of a layer in 16 bits and 8 experts on a GPU they make 150 a layer and micro-batch, forward and backward; a
profile of that has 463,348 in 64 x 48, 151 (Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap, 16 H100s)."""
CAST_KERNELS = {"delayed": 1, "current": 4, "block": 1}
"""That cast an operand to fp8, by ``fp8_scaling``; with the scale of its own largest value, that value is cleared, sought and made a scale before (Transformer
Engine, pytorch/csrc/quantizer.cpp and common/recipe/current_scaling.cu)."""
FOLLOWING_S = 5e-6
"""Seconds of a host to start a kernel in the same call of C++ as the one before: the upper end of a start in CUDA."""
EXPERT_STREAMS = 4
"""That products of single experts are computed on side by side (Transformer Engine, ``num_compute_streams``)."""


def kernels_of_layer(layout: TrainingLayout, products: int, *, has_experts: bool) -> float:
    """Returns the kernels of a layer forward, without those of single experts: ``products``, attention and what is elementwise; in fp8 each product's operand
    is cast."""
    return products * (1 + _casts(layout)) + 1 + _elementwise(layout, has_experts)


def gap_seconds(layout: TrainingLayout, products: int, local: int, kernel_s: float) -> tuple[float, float]:
    """Returns the seconds between the kernels of a layer on its GPU, ``kernel_s`` each, forward and backward, but those of ``products`` and attention, which
    have their own. ``local``: experts (0: no mixture), whose products are on several streams."""
    kernels = CAST_KERNELS[layout.fp8_scaling] if layout.precision == "fp8" else 0
    kinds = 1 if layout.experts_as == "grouped" else local
    forward = products * kernels + 2 * kinds * kernels + _elementwise(layout, local > 0)
    beside = max(0, kinds - 1) / EXPERT_STREAMS
    return (forward + 2 * beside) * kernel_s, (forward + _elementwise(layout, local > 0) + 4 * beside) * kernel_s


def _elementwise(layout: TrainingLayout, has_experts: bool) -> int:
    return (FUSED_KERNELS if layout.fused_elementwise else EAGER_KERNELS) + (ROUTING_KERNELS if has_experts else 0)


def _casts(layout: TrainingLayout) -> float:
    """Returns the starts of kernels that the cast of an operand takes as long as."""
    return 1 + (CAST_KERNELS[layout.fp8_scaling] - 1) * FOLLOWING_S / START_S if layout.precision == "fp8" else 0.0


def waited_seconds(layout: TrainingLayout, kernels: float, gpu_s: float) -> float:
    """Returns the seconds for which a GPU that computes ``kernels`` in ``gpu_s`` waits for its host."""
    return 0.0 if layout.cuda_graphs else max(0.0, kernels * START_S - gpu_s)


def expert_kernels(layout: TrainingLayout, local: int) -> tuple[float, float]:
    """Returns the kernels of ``local`` experts in a layer, forward and backward: two products of each forward and four backward, and in fp8 a cast of each
    operand that is not a weight. Grouped, those of one."""
    kinds = 1 if layout.experts_as == "grouped" else local
    casts = 2 * kinds * _casts(layout)
    return 2 * kinds + casts, 4 * kinds + casts


def expert_waits(layout: TrainingLayout, local: int, gpu_s: tuple[float, float]) -> tuple[float, float]:
    """Returns the seconds for which a GPU with ``local`` experts waits in a layer, forward and backward, whose products take it ``gpu_s``: none where the host
    knows their sizes. Once they are read, nothing is queued until the next kernel starts."""
    if layout.experts_as == "padded" or layout.cuda_graphs:
        return 0.0, 0.0
    forward, backward = expert_kernels(layout, local)
    return START_S + waited_seconds(layout, forward, gpu_s[0]), waited_seconds(layout, backward, gpu_s[1])
