"""Section ``trainer``: the optimizer and how much of a batch is in memory at once."""

import math
from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError

Schedule = Literal["constant", "linear", "cosine", "wsd"]
OptimizerName = Literal["adamw", "muon", "adamw8bit"]


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The optimizer and the step around it.

    ``optimizer``: AdamW (Loshchilov and Hutter, 2019), Muon (Jordan et al., 2024) for the layers' matrices with AdamW for the rest, or AdamW
    with its moments in 8 bits (Dettmers et al., 2022).
    ``learning_rate``: after the warm-up.
    ``warmup_steps``: steps in which the learning rate rises in a straight line; 0 begins with all of it.
    ``schedule``: what it does after the warm-up: stays, falls in a straight line, falls along half a cosine, or stays and falls in
    a straight line in the last ``decay_steps`` (``wsd``: Hu et al., 2024).
    ``total_steps``: the step at which all but ``constant`` reach their end; ``constant`` does not read it.
    ``min_lr_ratio``: the share of ``learning_rate`` that is left at ``total_steps`` and after.
    ``beta1``, ``beta2``, ``epsilon``, ``weight_decay``: AdamW's own; norms and biases are never decayed.
    ``muon_momentum``, ``muon_iterations``: of Muon, which shares ``learning_rate`` and ``weight_decay``.
    ``max_grad_norm``: global norm to which gradients are clipped; 0 turns clipping off.
    ``micro_batch_tokens``: tokens in one forward and backward at most (a single longer sequence has its own).
    ``recompute``: what the backward pass computes again instead of keeping: nothing, what costs little (``selective``: norms, rotation, the
    gate), or whole layers (``full``). The bits of gradients do not change.
    ``router_balance_loss``: the coefficient of the load-balancing loss of a mixture of experts (Fedus et al., 2021); 0: none.
    ``router_bias_rate``: what the bias on the choice of experts moves by after each step (DeepSeek-V3; 0.001 there); 0: no bias.
    ``dtype``: of weights, gradients and moments.
    ``precision``: what linear layers multiply in: ``fp32`` (``dtype``), or 16 bits (``bf16``, ``fp16``) or 8 (``fp8``) with weights, moments
    and gradients of weights in fp32.
    ``loss_scale``, ``loss_scale_growth_steps``: of ``fp16``: what the loss is multiplied by at first, a power of two, and the steps
    without an overflow after which that doubles.
    ``max_skipped_steps``: steps in a row whose loss or gradient is not finite that pretraining leaves out before it stops; in a pod the
    first one ends the run.
    ``offload``: where AdamW's moments live: beside the weights, in the host's memory (``cpu``; where the weights are there too, nothing
    changes), or in a file of ``offload_folder`` (``nvme``; empty: of the run's own folder), from which each step pages them.
    ``offload_parameters``: where the layers' weights and their gradients live: in memory, or in that file too (``nvme``), from which a layer
    is read ahead of its forward and of its backward.
    ``offload_activations``: where what a forward saves for its backward waits: in memory, or in a file of that folder (``nvme``).
    """

    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    muon_momentum: float = 0.95
    muon_iterations: int = 5
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    recompute: Literal["none", "full", "selective"] = "none"
    router_balance_loss: float = 0.0
    router_bias_rate: float = 0.0
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000
    max_skipped_steps: int = 3
    offload: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: Literal["none", "nvme"] = "none"
    offload_activations: Literal["none", "nvme"] = "none"
    offload_folder: str = ""

    @property
    def offloads(self) -> bool:
        """Whether something lies in a file."""
        return "nvme" in (self.offload, self.offload_parameters, self.offload_activations)

    def check(self) -> None:
        """Raise ``UserError`` for a value that cannot train."""
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("weight_decay", "max_grad_norm", "router_balance_loss", "router_bias_rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 (off) or more, and finite")
        for name in ("warmup_steps", "total_steps", "decay_steps", "max_skipped_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 or more")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"'trainer.total_steps' is {self.total_steps}; schedule '{self.schedule}' needs more than "
                f"trainer.warmup_steps ({self.warmup_steps})"
            )
        if self.schedule == "wsd" and not 0 < self.decay_steps <= self.total_steps - self.warmup_steps:
            raise UserError(
                f"'trainer.decay_steps' is {self.decay_steps}; schedule 'wsd' needs 1 to {self.total_steps - self.warmup_steps} of them, "
                "which is trainer.total_steps without trainer.warmup_steps"
            )
        if not 1 <= self.muon_iterations <= 20:
            raise UserError(f"'trainer.muon_iterations' is {self.muon_iterations}; it must be between 1 and 20 (5 is usual)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"'trainer.min_lr_ratio' is {self.min_lr_ratio}; it must be between 0 and 1")
        if self.micro_batch_tokens < 1:
            raise UserError(f"'trainer.micro_batch_tokens' is {self.micro_batch_tokens}; it must be at least 1")
        if self.precision != "fp32" and self.dtype != "float32":
            raise UserError(f"'trainer.precision' is '{self.precision}', whose weights are float32; trainer.dtype is '{self.dtype}'")
        if not 1 <= self.loss_scale <= 2**24 or math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(f"'trainer.loss_scale' is {self.loss_scale}; it must be a power of two from 1 to 2^24")
        if self.loss_scale_growth_steps < 1:
            raise UserError(f"'trainer.loss_scale_growth_steps' is {self.loss_scale_growth_steps}; it must be at least 1")
        if self.offload != "none" and self.optimizer != "adamw":
            raise UserError(f"'trainer.offload' is '{self.offload}', which pages AdamW's moments; trainer.optimizer is '{self.optimizer}'")
        if self.offload_parameters == "nvme" and self.offload != "nvme":
            raise UserError(
                f"'trainer.offload_parameters' is 'nvme' and trainer.offload is '{self.offload}': moments, twice the weights, go first; set "
                "trainer.offload to nvme too"
            )
        if self.offload_activations == "nvme" and self.recompute == "selective":
            raise UserError(
                "'trainer.offload_activations' is 'nvme' with trainer.recompute selective, which looks through the same tensors; set "
                "trainer.recompute to none or full"
            )
        if self.offload_folder and "nvme" not in (self.offload, self.offload_activations):
            raise UserError(
                f"'trainer.offload_folder' is '{self.offload_folder}' and trainer.offload is '{self.offload}'; set that to nvme, or "
                "trainer.offload_activations"
            )
