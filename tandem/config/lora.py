"""Section ``trainer.lora``: low-rank adapters."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tandem.config.limits import check_at_least_one, check_float32
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
LINEAR_MODULES = (*ATTENTION_MODULES, *MLP_MODULES)
"""The matrices of a layer that an adapter can change, by the names of PEFT's ``target_modules``, in the order of a model's folder."""
LATENT_MODULES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Those of a layer with latent attention (DeepSeek), beside q_proj, where queries are not compressed, and o_proj."""
LINEAR_ATTENTION_MODULES = ("in_proj_qkvz", "in_proj_ba", "out_proj")
"""Those of a layer with linear attention (Qwen3-Next)."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adaptation (LoRA; Hu et al., 2021): the model's weights stay as they are, and only two small matrices beside each of `target_modules` are
    trained: W x becomes W x + scale B A x, with A [`rank`, K], B [N, `rank`] and scale = `alpha` / `rank`. A begins as PEFT draws it, B with 0. An empty
    section (`{}`) turns it on."""

    rank: int = 16
    """The rank of the adapter's matrices (PEFT: `r`)."""
    alpha: float = 32.0
    """The adapter's output is multiplied by `alpha` / `rank` (PEFT: `lora_alpha`)."""
    target_modules: tuple[str, ...] = LINEAR_MODULES
    """The matrices with an adapter, of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj` and `down_proj`; by default all of them. Those of
    experts have none. In a model with latent attention `q_a_proj` and `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`, `kv_b_proj` and `o_proj`. In
    layers with linear attention `in_proj_qkvz`, `in_proj_ba` and `out_proj`. With `model.implementation: transformers` linear layers of the module, by the
    last part of their names; a module that has other names than the seven needs them named here, and one with a mixture of experts those of its attention."""
    quantization: Literal["none", "nf4", "int4"] = "none"
    """Keep the matrices of the layers that stay as they are in 4 bits, in the trainer and in the engine, and decode them where they are multiplied
    (QLoRA; Dettmers et al., 2023). `nf4`: 4-bit NormalFloat with a scale for every 64 weights; `int4`: whole numbers with a scale and a zero for every 128.
    The embedding, the head, norms, biases, experts and the adapter keep `trainer.dtype`; with `model.implementation: transformers` so does what an adapter
    cannot change."""
    use_rslora: bool = False
    """Multiply by `alpha` / sqrt(`rank`) instead (Kalajdzievski, 2023)."""

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("trainer.lora", self, "rank")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"'trainer.lora.alpha' is {self.alpha}; it must be above 0 and finite")
        check_float32("trainer.lora", self, "alpha")
        if not self.target_modules:
            raise UserError("'trainer.lora.target_modules' is empty, so that nothing would be trained; name at least one, or leave the key out for all")
        for name in self.target_modules:
            if self.target_modules.count(name) > 1:
                raise UserError(f"'trainer.lora.target_modules' has '{name}' twice; name each once")

    def check_names(self) -> None:
        """Raises ``UserError`` for a matrix that no network of Tandem's own has."""
        for name in self.target_modules:
            if name not in (supported := (*LINEAR_MODULES, *LATENT_MODULES, *LINEAR_ATTENTION_MODULES)):
                raise UserError(f"'trainer.lora.target_modules' has '{name}'; supported are {', '.join(supported)}")


def check_rollout_lora(recipe: "Recipe") -> None:
    """Checks what adapters cannot be combined with in a run with rollouts."""
    if recipe.trainer.lora is None:
        return
    if recipe.has_shared_critic:
        raise UserError("'critic.shared' is true, which trains the actor's trunk for the critic too, and trainer.lora leaves it as it is; set it to false")
    engine = recipe.rollout.engine
    if recipe.trainer.lora.quantization != "none" and engine.tensor_parallel_size > 1 and not engine.deterministic:
        raise UserError(
            f"'rollout.engine.deterministic' is false with tensor_parallel_size {engine.tensor_parallel_size} and trainer.lora.quantization "
            f"'{recipe.trainer.lora.quantization}', whose groups of columns would be divided between the engine's ranks; leave deterministic out"
        )
    if recipe.trainer.lora.quantization != "none" and recipe.rollout.engine.quantization is not None:
        raise UserError(
            f"'rollout.engine.quantization' is '{recipe.rollout.engine.quantization}', and the engine quantizes as trainer.lora.quantization "
            f"'{recipe.trainer.lora.quantization}' says; remove the key"
        )
    if recipe.reference.follows:
        raise UserError(
            f"'reference.update' is '{recipe.reference.update}' and with trainer.lora the reference is the model without its adapter, which nothing changes; "
            "set it to never"
        )
