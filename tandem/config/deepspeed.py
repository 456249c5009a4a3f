"""What DeepSpeed as a trainer's backend does not do here."""

from typing import TYPE_CHECKING

from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


def check_deepspeed(recipe: "Recipe") -> None:
    """Raises ``UserError`` for the first key of ``recipe`` that ``trainer.backend: deepspeed`` does not take."""
    trainer, parallel = recipe.trainer, recipe.parallel
    only: tuple[tuple[str, object, object, str], ...] = (
        ("trainer.optimizer", trainer.optimizer, "adamw", "updates with AdamW"),
        ("trainer.dtype", trainer.dtype, "float32", "is driven in fp32"),
        ("trainer.precision", trainer.precision, "fp32", "is driven in fp32"),
        ("trainer.offload_parameters", trainer.offload_parameters, "none", "keeps weights in memory"),
        ("trainer.offload_activations", trainer.offload_activations, "none", "keeps activations in memory"),
        ("trainer.router_balance_loss", trainer.router_balance_loss, 0.0, "does not balance experts"),
        ("trainer.router_bias_rate", trainer.router_bias_rate, 0.0, "does not balance experts"),
        ("parallel.tensor", parallel.tensor, 1, "divides batches and states, not matrices"),
        ("parallel.pipeline", parallel.pipeline, 1, "divides batches and states, not layers"),
        ("parallel.context", parallel.context, 1, "divides batches and states, not sequences"),
        ("parallel.expert", parallel.expert, 1, "divides batches and states, not experts"),
        ("machine.device", recipe.machine.device == "cuda", False, "is driven on CPUs in this version"),
    )  # fmt: skip
    for key, value, allowed, why in only:
        if value != allowed:
            given, fix = ("cuda", "cpu") if key == "machine.device" else (value, allowed)
            raise UserError(f"'{key}' is {given} and trainer.backend 'deepspeed', which {why}; set it to {fix}, or trainer.backend to tandem")
    if trainer.offload == "nvme":
        raise UserError("'trainer.offload' is 'nvme' and trainer.backend 'deepspeed', which is driven with 'cpu' or 'none'; set it to one of them")
    if parallel.data > 1 and parallel.zero == 0:
        raise UserError(
            f"'parallel.zero' is 0 with parallel.data {parallel.data} and trainer.backend 'deepspeed', which shards at least the optimizer's state; set it to "
            "1, 2 or 3"
        )
    if trainer.recompute != "none" and parallel.zero == 3:
        raise UserError(
            f"'trainer.recompute' is '{trainer.recompute}' with parallel.zero 3 and trainer.backend 'deepspeed', which frees a layer's weights before they "
            "are computed with again; set it to none, or parallel.zero to 2"
        )
    if trainer.lora is not None:
        raise UserError("'trainer.lora' is given and trainer.backend is 'deepspeed', which trains whole weights; remove it, or set trainer.backend to tandem")
    if recipe.algorithm.name == "ppo":
        raise UserError("'algorithm.name' is 'ppo' and trainer.backend 'deepspeed', which trains no critic; set it to grpo, or trainer.backend to tandem")
    if recipe.reference.follows:
        raise UserError(
            f"'reference.update' is '{recipe.reference.update}' and trainer.backend 'deepspeed', whose weights a reference cannot follow; set it to never"
        )
    if recipe.residents.plan not in ("auto", "keep", "sleep"):
        raise UserError(
            f"'residents.plan' is '{recipe.residents.plan}' and trainer.backend 'deepspeed', whose memory is not moved away; set it to auto, keep or sleep"
        )
