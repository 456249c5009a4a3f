"""What models vLLM draws samples of here, and with what of a recipe. Imports neither vLLM nor torch."""

from tandem.config.recipe import Recipe
from tandem.layout.shapes import ModelShapes
from tandem.model.family import family_named
from tandem.types.errors import UserError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that vLLM 0.32 has an attention kernel for on a CPU."""
CPU_EXPERT_MULTIPLE = 32
"""What vLLM 0.32 divides the matrices of experts into on a CPU; others are padded, or have no kernel."""
_TO_TANDEM = "set rollout.backend to tandem"


def check_model(shapes: ModelShapes, device: str, recipe: Recipe) -> None:
    """Raises ``UserError`` for a model whose weights are not read back from vLLM, or that it has no kernel for on ``device``: it would end in its first
    step. And for a mixture of experts whose routing cannot be replayed."""
    experts = family_named(shapes.architecture).experts
    if experts is not None and experts.stacked:
        raise UserError(f"the model is a {shapes.architecture}, whose folder has all experts of a layer in one tensor, as no update sends them; {_TO_TANDEM}")
    if shapes.latent is not None:
        raise UserError(f"the model has latent attention, whose matrices are not read back from vLLM; {_TO_TANDEM}")
    if shapes.linear_attention is not None:
        raise UserError(f"the model has layers with linear attention, whose weights are not read back from vLLM; {_TO_TANDEM}")
    if device == "cpu" and shapes.head_dim not in CPU_HEAD_SIZES:
        raise UserError(
            f"the model has heads of {shapes.head_dim} values, for which vLLM has no attention on a CPU (it has {', '.join(map(str, CPU_HEAD_SIZES))}); "
            f"{_TO_TANDEM}"
        )
    if shapes.experts is None:
        if recipe.trainer.router_replay == "R3":
            raise UserError("'trainer.router_replay' is 'R3' and the model has no experts; remove the key")
        return
    # Each rank has a part of every expert.
    ranks = recipe.rollout.engine.tensor_parallel_size
    inner = shapes.experts.intermediate_size // ranks
    if device != "cpu":
        raise UserError(f"the model has a mixture of experts, whose weights are read back from vLLM on a CPU alone in this version; {_TO_TANDEM}")
    if inner % CPU_EXPERT_MULTIPLE or shapes.hidden_size % CPU_EXPERT_MULTIPLE:
        raise UserError(
            f"the model's experts have matrices of {inner} by {shapes.hidden_size}{f' on each of {ranks} ranks' if ranks > 1 else ''}, and vLLM's on a CPU are "
            f"multiples of {CPU_EXPERT_MULTIPLE}; {_TO_TANDEM}"
        )
    if recipe.trainer.router_bias_rate:
        raise UserError(
            f"'trainer.router_bias_rate' is {recipe.trainer.router_bias_rate:g} and rollout.backend 'vllm', whose routers know no such bias; set it to 0"
        )
    if recipe.replays_routing(True):
        _check_replay(recipe)


def _check_replay(recipe: Recipe) -> None:
    refused = {
        "trainer.share_prompts": (recipe.trainer.share_prompts, "computes a prompt once for samples that each have a routing of it", "false"),
        "trainer.backend": (recipe.trainer.backend == "megatron", "chooses experts in its own layers", "tandem"),
        "rollout.engine.enable_prefix_caching": (
            not recipe.rollout.engine.enable_prefix_caching, "leaves vLLM without the blocks that it keeps a routing with", "true"
        ),
    }  # fmt: skip
    for key, (is_given, reason, value) in refused.items():
        if is_given:
            fix = f"set it to {value}, or trainer.router_replay to disabled"
            raise UserError(f"'{key}' {reason}, and the routing of vLLM's mixture of experts is replayed; {fix}")
