"""Builds a rank's part of a GPT of Megatron-Core for the shapes of a decoder."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from tandem.backends.megatron.parts import stage_name
from tandem.backends.megatron.passes import dispatcher
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.latent_attention import NORM_EPS
from tandem.layout.shapes import ModelShapes
from tandem.model.megatron.arguments import attention_arguments, expert_arguments, latent_arguments
from tandem.model.megatron.layout import padded_vocabulary
from tandem.trainer.parallel.ranks import Ranks


class Norm(torch.nn.RMSNorm):
    """RMSNorm as layers of Megatron's make it. Of its own norms that need neither Transformer Engine nor Apex, none goes with sequence parallelism, which asks
    for one thing more: a mark on the weight, whose gradient each tensor rank has for its tokens alone, so that Megatron sums it over them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CompressedNorm(Norm):
    """The norm of a compressed vector of latent attention, with the epsilon of Hugging Face's models."""

    def __init__(self, config: Any, hidden_size: int, **_: object) -> None:
        super().__init__(config, hidden_size, NORM_EPS)


@cache
def latent_core_attention() -> Any:
    """Returns Megatron's own attention for heads whose values have another size than their keys, which it takes from Transformer Engine alone."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCoreAttention(DotProductAttention):  # type: ignore[misc]
        """``config.kv_channels`` is the size of a value."""

        def __init__(self, *arguments: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any) -> None:
            super().__init__(*arguments, **options)

    return LatentCoreAttention


COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtype of Megatron's parameters and activations for each ``trainer.precision``. In bf16 its optimizers update fp32 copies, gradients are summed in fp32,
and softmax, routers and losses are computed in it."""


def transformer_config(shapes: ModelShapes, ranks: Ranks, dtype: torch.dtype, parallel: ParallelConfig) -> Any:
    """Returns Megatron's ``TransformerConfig`` of ``shapes`` on the mesh of ``ranks``, with parameters and activations of ``dtype``.

    No fused kernel is switched on, and no dropout. Losses and gradients are summed over tokens, micro-batches and ranks as they are, because the loss has
    the counts of the global batch in it (``calculate_per_token_loss``)."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    shape, experts, latent, is_interleaved = ranks.mesh.shape, shapes.experts, shapes.latent, parallel.virtual_stages > 1
    further: dict[str, Any] = {} if experts is None else {
        **expert_arguments(experts, shapes.num_hidden_layers),
        # A list makes layers with names of their own in distributed checkpoints.
        **({} if experts.dense_layers else {"moe_layer_freq": 1}),
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0, "moe_grouped_gemm": False,
        "moe_router_dtype": "fp32", "expert_model_parallel_size": shape.expert,
    }  # fmt: skip
    if latent is not None:
        further |= latent_arguments(shapes, latent) | {"rotary_base": shapes.rope_theta}
    return (TransformerConfig if latent is None else MLATransformerConfig)(
        num_layers=shapes.num_hidden_layers, hidden_size=shapes.hidden_size, ffn_hidden_size=shapes.intermediate_size,
        num_attention_heads=shapes.num_attention_heads, num_query_groups=shapes.num_key_value_heads,
        kv_channels=shapes.head_dim if latent is None else latent.v_head_dim,
        normalization="RMSNorm", layernorm_epsilon=shapes.rms_norm_eps, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        add_qkv_bias=shapes.attention_bias, qk_layernorm=shapes.qk_norm or latent is not None, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=shape.tensor, sequence_parallel=shape.tensor > 1 and parallel.sequence_parallel,
        pipeline_model_parallel_size=shape.pipeline, pipeline_dtype=dtype, params_dtype=dtype,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if is_interleaved else None,
        # Between the same two ranks of an interleaved pipeline go activations and gradients, which a batch of transfers does not tell apart.
        overlap_p2p_comm=is_interleaved, batch_p2p_comm=not is_interleaved,
        bf16=dtype == torch.bfloat16,
        # The stages of a pipeline tell each other the shapes of activations, in such a batch; with experts and interleaved they have one.
        variable_seq_lengths=shape.pipeline > 1 and experts is None and not is_interleaved,
        moe_token_dispatcher_type="alltoall" if experts is None else dispatcher(ranks),
        use_cpu_initialization=ranks.device.type == "cpu", calculate_per_token_loss=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False, **attention_arguments(shapes), **further,
    )  # fmt: skip


def layer_specs(config: Any, virtual_stage: int | None) -> Any:
    """Returns Megatron's local specification of the layers of a stage, dense and with experts, whose norms may divide tokens over tensor ranks."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.post_training.modelopt.layers import Linear

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual_stage)
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if config.multi_latent_attention:
            attention.q_layernorm = attention.kv_layernorm = CompressedNorm
            attention.core_attention = latent_core_attention()
            # Whole on every rank, as with Transformer Engine: of divided ones 0.16 does not sum the gradient of the shared rotated key over ranks.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            fused = {f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")}
            if not hasattr(parts.mlp.submodules, "experts"):
                fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
            # The keys of Transformer Engine's layers in distributed checkpoints, as the specification has them for other attention.
            parts.sharded_state_dict_keys_map = fused
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    block.layer_norm = Norm
    return block


def build_gpt(shapes: ModelShapes, config: Any, virtual_stage: int | None = None) -> Any:
    """Returns the ``GPTModel`` of this rank's stage, or of one of its stages in an interleaved pipeline; its weights are not filled."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if shapes.experts is not None and not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 reads the name also where Transformer Engine, which defines it, is not installed.
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        # 0.16 compares with the class also where Transformer Engine, which defines it, is not installed.
        multi_latent_attention.HAVE_TE = False
    gpt = GPTModel(
        config, layer_specs(config, virtual_stage), padded_vocabulary(shapes, config.tensor_model_parallel_size), shapes.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage), vp_stage=virtual_stage,
        share_embeddings_and_output_weights=shapes.tie_word_embeddings, position_embedding_type="rope",
        rotary_base=shapes.rope_theta, rotary_percent=shapes.rotary_fraction,
        rope_scaling=shapes.rope_scaling.kind == "llama3", rope_scaling_factor=shapes.rope_scaling.factor,
    )  # fmt: skip
    for module in gpt.modules():
        if isinstance(module, Linear):
            # Each tensor rank multiplies its own tokens, as with norms.
            module.weight.sequence_parallel = config.sequence_parallel
    return gpt


def build_network(shapes: ModelShapes, ranks: Ranks, trainer: TrainerConfig, parallel: ParallelConfig) -> list[Any]:
    """Returns this rank's part of the GPT, each of its stages in Megatron's ``DistributedDataParallel``; the weights are not filled."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(shapes, ranks, COMPUTED_IN[trainer.precision], parallel)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=parallel.zero == 1, grad_reduce_in_fp32=True)
    stages: list[int | None] = [None] if parallel.virtual_stages == 1 else list(range(parallel.virtual_stages))
    networks = [build_gpt(shapes, config, stage).to(ranks.device) for stage in stages]
    data_parallel = [DistributedDataParallel(config, settings, Float16Module(config, each) if config.bf16 else each) for each in networks]
    keep_biases(networks)

    def finalize(model: Any, num_tokens: Any = None, *arguments: Any, **options: Any) -> None:
        # Without the number of tokens, which the loss has divided by already.
        finalize_model_grads(model, None, *arguments, **options)

    config.finalize_model_grads_func = finalize
    return data_parallel


def build_optimizer(network: Sequence[Any], trainer: TrainerConfig, is_sharded: bool) -> Any:
    """Returns Megatron's AdamW over ``network``: with ``is_sharded`` the distributed optimizer (ZeRO 1)."""
    from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    dtype = COMPUTED_IN[trainer.precision]
    config = OptimizerConfig(
        optimizer="adam", lr=trainer.learning_rate, min_lr=0.0, weight_decay=trainer.weight_decay, adam_beta1=trainer.beta1, adam_beta2=trainer.beta2,
        adam_eps=trainer.epsilon, clip_grad=trainer.max_grad_norm, use_distributed_optimizer=is_sharded, params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )  # fmt: skip
    # Norms and biases are never decayed.
    not_decayed = ParamKey(predicate=ParamPredicate("vectors", lambda parameter: parameter.ndim < 2))
    return get_megatron_optimizer(config, list(network), config_overrides={not_decayed: ParamGroupOverride(wd_mult=0.0)}, use_gloo_process_groups=False)


def gpt_of(network: Any) -> Any:
    """Returns the ``GPTModel`` within what Megatron wraps it in."""
    while hasattr(network, "module"):
        network = network.module
    return network


def named_parameters(network: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of this rank's stages by name (``stage_name``)."""
    for stage, each in enumerate(network):
        for name, parameter in gpt_of(each).named_parameters():
            yield stage_name(name, stage, len(network)), parameter


def keep_biases(networks: Sequence[Any]) -> None:
    """Returns to fp32 the biases with which routers choose experts, which a cast of a network rounds and Megatron keeps in fp32 from the first pass on."""
    for module in (part for each in networks for part in each.modules() if hasattr(part, "_maintain_float32_expert_bias")):
        module._maintain_float32_expert_bias()


def named_biases(network: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields by name the biases with which routers choose experts: buffers, which no optimizer changes."""
    for stage, each in enumerate(network):
        for name, buffer in gpt_of(each).named_buffers():
            if name.endswith("router.expert_bias"):
                yield stage_name(name, stage, len(network)), buffer
