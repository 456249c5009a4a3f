"""Section ``trainer``: the optimizer, precision, memory and learning rate schedule."""

import math
from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one, check_float32
from tandem.config.lora import LoraConfig
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

Schedule = Literal["constant", "linear", "cosine", "wsd"]
OptimizerName = Literal["adamw", "muon", "adamw8bit"]
TrainDtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The optimizer and the training step; `training.md` says how to choose."""

    backend: Literal["tandem", "megatron", "deepspeed"] = "tandem"
    """What computes the training steps of a pod: `tandem`, or Megatron-Core or DeepSpeed in an environment of its own (`tandem sidecar install`)."""
    optimizer: OptimizerName = "adamw"
    """`adamw`, `muon` for the layers' matrices with AdamW for the rest, or `adamw8bit`: AdamW with 8-bit moments."""
    learning_rate: float = 1e-6
    """The learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0. 0: no warm-up."""
    schedule: Schedule = "constant"
    """The learning rate after the warm-up: `constant`, falling linearly (`linear`) or along half a `cosine` until `run.max_steps`, or
    constant and falling linearly in the last `decay_steps` before it (`wsd`: Hu et al., 2024)."""
    decay_steps: int = 0
    """Steps in which `wsd` decays."""
    min_lr_ratio: float = 0.0
    """Share of `learning_rate` that remains at `run.max_steps`."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.999
    """AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay; norms and biases are never decayed."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    muon_iterations: int = 5
    """Newton-Schulz iterations per update."""
    max_grad_norm: float = 1.0
    """Global norm to which gradients are clipped. 0: off."""
    micro_batch_tokens: int = 16384
    """Maximum number of tokens in one forward and backward pass. Loss and gradients do not depend on it."""
    share_prompts: bool = False
    """Compute what sequences begin with in common once in a forward and backward pass: the prompt of a group, and its completions as far as they are
    equal; with `dpo`, what the two answers of a pair begin with. Log-probabilities keep their bits; gradients are sums in another order."""
    recompute: Literal["none", "full", "selective"] = "none"
    """What the backward pass recomputes instead of storing: `none`, cheap operations (`selective`: norms, rotary embedding, gate), or whole
    layers (`full`). The bits of gradients do not change."""
    router_balance_loss: float | None = None
    """Coefficient of the load-balancing loss of a mixture of experts: of each layer, or with `model.implementation: transformers` of all layers together, as
    transformers computes it. 0: off. By default off, but with that implementation `router_aux_loss_coef` of a `config.json` with `output_router_logits`."""
    router_bias_rate: float = 0.0
    """Step size of the bias on the choice of experts (DeepSeek-V3: 0.001), which a Hugging Face folder cannot store. 0: off."""
    router_replay: Literal["auto", "R3", "disabled"] = "auto"
    """Where the experts of a mixture are chosen that tokens are trained with. `R3` (rollout routing replay): those that another engine than Tandem's sent the
    tokens to are recorded, and the trainer's forward passes send them there; its routers give the gates and get gradients. `disabled`: the trainer's routers
    choose again. `auto`: `R3` for a mixture of experts with `rollout.backend` `vllm`. Tandem's engine needs none: it routes as the trainer does."""
    corruption_check: float = 0.01
    """Share of the micro-batches that a second data-parallel rank computes too, to find silent data corruption: loss and gradients are compared bit for
    bit. Costs this share of the passes. 0: off, as with one data-parallel rank and with another `backend`."""
    dtype: TrainDtype = "float32"
    """Dtype of weights, activations, gradients and moments. A pod's engine computes in the same one. `bfloat16` takes half the memory of
    `float32` and rounds every update to 8 bits; 16-bit products over fp32 weights are `precision`."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Precision of linear layers: `fp32`, `bf16`, `fp16` with dynamic loss scaling, or `fp8`; weights, moments and gradients stay in fp32."""
    loss_scale: float = 65536.0
    """With `fp16`: the initial loss scale, a power of two."""
    loss_scale_growth_steps: int = 2000
    """With `fp16`: steps without an overflow after which the loss scale doubles."""
    max_skipped_steps: int = 3
    """Maximum number of consecutive steps skipped because their loss or gradient is not finite, before the run stops."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where AdamW's moments are stored: `none` with the weights, `cpu` in host memory (no effect for weights on a CPU), `nvme` in a file
    that each step pages them from."""
    offload_parameters: Literal["none", "nvme"] = "none"
    """Where the layers' weights and gradients are stored: `none` in memory, `nvme` in that file too, from which a layer is prefetched for
    its forward and its backward pass. Needs `offload: nvme` and, with several ranks, `parallel.zero: 3`."""
    offload_activations: Literal["none", "nvme"] = "none"
    """Where activations saved for the backward pass are stored: `none` in memory, `nvme` in a file, written behind the forward and
    prefetched by the backward pass. Not with `recompute: selective`; in a pipeline only with `schedule: 1f1b`."""
    offload_folder: str = ""
    """Folder of the offload files. Empty: the run's folder."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter and leave the weights as they are. Empty: off. A section of its own, below."""

    @property
    def multiplies_in(self) -> Literal["fp32", "bf16", "fp16", "fp8"]:
        """The precision of products, whatever the weights' dtype."""
        return "bf16" if self.dtype == "bfloat16" else self.precision

    @property
    def offloads(self) -> bool:
        """Whether any state is offloaded to a file."""
        return "nvme" in (self.offload, self.offload_parameters, self.offload_activations)

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("weight_decay", "max_grad_norm", "router_balance_loss", "router_bias_rate"):
            if not 0 <= (getattr(self, name) or 0.0) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 (off) or more, and finite")
        check_float32("trainer", self, "learning_rate", "epsilon", "weight_decay", "max_grad_norm", "router_balance_loss", "router_bias_rate")
        for name in ("warmup_steps", "decay_steps", "max_skipped_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 or more")
        if not 1 <= self.muon_iterations <= 20:
            raise UserError(f"'trainer.muon_iterations' is {self.muon_iterations}; it must be between 1 and 20 (5 is usual)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"'trainer.min_lr_ratio' is {self.min_lr_ratio}; it must be between 0 and 1")
        if not 0 <= self.corruption_check <= 1:
            raise UserError(f"'trainer.corruption_check' is {self.corruption_check}; it must be between 0 (off) and 1")
        check_at_least_one("trainer", self, "micro_batch_tokens")
        if self.precision != "fp32" and self.dtype != "float32":
            raise UserError(f"'trainer.precision' is '{self.precision}', whose weights are float32; trainer.dtype is '{self.dtype}'")
        if self.dtype == "float16":
            # The same reason for which torch.amp refuses to unscale fp16 gradients.
            raise UserError(
                "'trainer.dtype' is 'float16', in which squared gradients below 6e-8 are 0, so that AdamW divides by 0; set trainer.dtype to "
                "bfloat16, or to float32 with trainer.precision fp16"
            )
        if self.optimizer == "adamw8bit" and self.dtype != "float32":
            raise UserError(
                f"'trainer.dtype' is '{self.dtype}' and trainer.optimizer 'adamw8bit' decodes its moments to float32; set trainer.dtype to float32"
            )
        if not 1 <= self.loss_scale <= 2**24 or math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(f"'trainer.loss_scale' is {self.loss_scale}; it must be a power of two from 1 to 2^24")
        check_at_least_one("trainer", self, "loss_scale_growth_steps")
        if self.offload != "none" and self.optimizer != "adamw":
            raise UserError(
                f"'trainer.offload' is '{self.offload}', which offloads AdamW's moments, and trainer.optimizer is '{self.optimizer}'; set "
                "trainer.offload to none or trainer.optimizer to adamw"
            )
        if self.offload_parameters == "nvme" and self.offload != "nvme":
            raise UserError(
                f"'trainer.offload_parameters' is 'nvme' and trainer.offload is '{self.offload}': moments, twice the size of the weights, "
                "must be offloaded first; set trainer.offload to nvme too"
            )
        if self.offload_activations == "nvme" and self.recompute == "selective":
            raise UserError(
                "'trainer.offload_activations' is 'nvme' with trainer.recompute selective, which handles the same tensors; set "
                "trainer.recompute to none or full"
            )
        self._check_lora()
        self._refuse_unread()

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        for name, allowed in (("optimizer", "adamw"), ("offload_parameters", "none")):
            if getattr(self, name) != allowed:
                raise UserError(f"'trainer.{name}' is '{getattr(self, name)}', which trainer.lora does not support; set trainer.{name} to {allowed}")
        if self.offload == "nvme":
            raise UserError("'trainer.offload' is 'nvme', and the moments of trainer.lora are small; set trainer.offload to none")
        if self.lora.quantization != "none":
            for name, allowed in (("dtype", "float32"), ("precision", "fp32")):
                if getattr(self, name) != allowed:
                    raise UserError(
                        f"'trainer.{name}' is '{getattr(self, name)}' and trainer.lora.quantization '{self.lora.quantization}', whose products are in fp32; "
                        f"set trainer.{name} to {allowed}"
                    )
        if self.router_bias_rate:
            raise UserError(
                f"'trainer.router_bias_rate' is {self.router_bias_rate} and trainer.lora leaves routers as they are; set trainer.router_bias_rate to 0"
            )

    def _refuse_unread(self) -> None:
        if self.optimizer != "muon":
            reason = f"trainer.optimizer is '{self.optimizer}'"
            refuse_unread("trainer", self, reason, "muon_momentum", "muon_iterations", fix="set trainer.optimizer to muon")
        if self.precision != "fp16":
            reason = f"trainer.precision is '{self.precision}'"
            refuse_unread("trainer", self, reason, "loss_scale", "loss_scale_growth_steps", fix="set trainer.precision to fp16")
        if self.schedule != "wsd":
            refuse_unread("trainer", self, f"trainer.schedule is '{self.schedule}'", "decay_steps", fix="set trainer.schedule to wsd")

    def check_offload_folder(self, saves_residents: bool = False) -> None:
        """Raises ``UserError`` for an ``offload_folder`` that is not read. ``saves_residents``: those of a pod may be saved there."""
        if self.offload_folder and not self.offloads and not saves_residents:
            raise UserError(
                f"'trainer.offload_folder' is '{self.offload_folder}' and trainer.offload is '{self.offload}'; set that to nvme, or "
                "trainer.offload_activations, or in a pod residents.plan to offload"
            )

    def check_share_prompts(self, context: int) -> None:
        """Raises ``UserError`` for what ``share_prompts`` cannot be combined with. ``context``: ``parallel.context``."""
        if not self.share_prompts:
            return
        if context > 1:
            raise UserError(
                f"'trainer.share_prompts' is true and parallel.context is {context}, which divides a sequence over ranks; set trainer.share_prompts to false "
                "or parallel.context to 1"
            )
        if self.router_balance_loss or self.router_bias_rate:
            raise UserError(
                "'trainer.share_prompts' is true, so that a prompt's tokens count once in the balance of experts; set trainer.router_balance_loss and "
                "trainer.router_bias_rate to 0, or trainer.share_prompts to false"
            )

    def check_schedule(self, total_steps: int, sft_schedule: Schedule = "constant") -> None:
        """Raises ``UserError`` for a schedule that does not fit in ``total_steps``, which is ``run.max_steps``, and for a ``min_lr_ratio``
        that is read neither by it nor by ``sft_schedule``, that of section ``sft``."""
        if self.schedule == sft_schedule == "constant":
            fix = "set trainer.schedule to linear, cosine or wsd"
            refuse_unread("trainer", self, "the learning rate is constant after the warm-up", "min_lr_ratio", fix=fix)
        if self.schedule != "constant" and total_steps <= self.warmup_steps:
            raise UserError(
                f"'run.max_steps' is {total_steps}; trainer.schedule '{self.schedule}' ends there and needs more than "
                f"trainer.warmup_steps ({self.warmup_steps})"
            )
        if self.schedule == "wsd" and not 0 < self.decay_steps <= total_steps - self.warmup_steps:
            raise UserError(
                f"'trainer.decay_steps' is {self.decay_steps}; schedule 'wsd' needs 1 to {total_steps - self.warmup_steps} decay steps, "
                "at most run.max_steps minus trainer.warmup_steps"
            )
