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
``MoEAlltoAllTokenDispatcher``)."""


def kernels_of_layer(layout: TrainingLayout, products: int, *, has_experts: bool) -> int:
    """Returns the kernels of a layer forward, without those of single experts: ``products``, attention and what is elementwise; in fp8 each product's operand
    is cast."""
    elementwise = FUSED_KERNELS if layout.fused_elementwise else EAGER_KERNELS
    casts = products if layout.precision == "fp8" else 0
    return products + casts + 1 + elementwise + (ROUTING_KERNELS if has_experts else 0)


def waited_seconds(layout: TrainingLayout, kernels: float, gpu_s: float) -> float:
    """Returns the seconds for which a GPU that computes ``kernels`` in ``gpu_s`` waits for its host."""
    return 0.0 if layout.cuda_graphs else max(0.0, kernels * START_S - gpu_s)


def expert_kernels(layout: TrainingLayout, local: int) -> tuple[int, int]:
    """Returns the kernels of ``local`` experts in a layer, forward and backward: two products of each forward and four backward, and in fp8 a cast of each
    operand that is not a weight. Grouped, those of one."""
    kinds = 1 if layout.experts_as == "grouped" else local
    casts = 2 * kinds if layout.precision == "fp8" else 0
    return 2 * kinds + casts, 4 * kinds + casts


def expert_waits(layout: TrainingLayout, local: int, gpu_s: tuple[float, float]) -> tuple[float, float]:
    """Returns the seconds for which a GPU with ``local`` experts waits in a layer, forward and backward, whose products take it ``gpu_s``: none where the host
    knows their sizes."""
    if layout.experts_as == "padded":
        return 0.0, 0.0
    forward, backward = expert_kernels(layout, local)
    return waited_seconds(layout, forward, gpu_s[0]), waited_seconds(layout, backward, gpu_s[1])
