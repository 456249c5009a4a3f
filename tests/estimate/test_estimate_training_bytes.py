"""The predicted bytes of Tandem's own trainer: optimizer states, checkpoints and activations against measured ones, the others worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.disk_bytes import offloaded_bytes
from tandem.estimate.model_bytes import held_by_layer, held_outside_layers, optimizer_bytes, weight_bytes
from tandem.estimate.resident_bytes import gradient_bytes, resident_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import RankMemory, memory_by_stage, predict_rank_memory, saved_by_stage
from tandem.estimate.training_bytes import checkpoint_bytes, state_bytes
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.families import gpt_oss
from tandem.model.initialise import initialise
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import Replica
from tandem.types import TrainSequence, UserError

MODELS = {
    "llama": ModelShapes("llama", 97, 64, 2, 4, 2, 16, 96, 128, tie_word_embeddings=False, attention_bias=True),
    "qwen3": ModelShapes("qwen3", 97, 64, 2, 4, 2, 16, 96, 128, tie_word_embeddings=True, qk_norm=True),
    "moe": ModelShapes("qwen3_moe", 97, 64, 2, 4, 2, 16, 96, 128, tie_word_embeddings=False, qk_norm=True, experts=ExpertShapes(4, 2, 32)),
    "gpt-oss": ModelShapes(
        "gpt_oss", 97, 64, 2, 4, 2, 16, 32, 128, tie_word_embeddings=False, attention_bias=True, output_bias=True, activation="clamped_swiglu",
        attention_sinks=True, experts=ExpertShapes(2, 1, 32, names=gpt_oss.NAMES, biased=True),
    ),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
@pytest.mark.parametrize("name", MODELS)
def test_state_and_checkpoint_have_the_predicted_bytes(name: str, optimizer: str, tmp_path: Path) -> None:
    shapes, config = MODELS[name], TrainerConfig(optimizer=optimizer)  # type: ignore[arg-type]
    model = Decoder(shapes, select("reference"))
    initialise(model, seed=0)
    made = make_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)
    assert sum(t.nbytes for t in made.state().moments.values()) == optimizer_bytes(shapes, optimizer)
    ranks = alone()
    checkpoints = ReplicaCheckpoints(
        tmp_path, 1, tmp_path / "start", ReplicaState(Replica(ranks, model, made)), GradScaler(config), ranks.world, asynchronous=False
    )
    checkpoints.save(1, {"steps": 1})
    checkpoints.close()
    written = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.safetensors"))
    assert 0 <= written - checkpoint_bytes(shapes, config) < 20_000, "the headers"


def test_each_choice_is_counted() -> None:
    shapes = MODELS["qwen3"]
    plain, halved, rounded = (
        predict_rank_memory(shapes, layout_of_trainer(TrainerConfig(precision=name), ParallelConfig(), 100)) for name in ("fp32", "bf16", "fp16")
    )
    assert halved == plain, "the kernels of a CPU round as they multiply, and keep fp32 operands"
    assert rounded.parameters == rounded.master_weights == plain.parameters == weight_bytes(shapes, "float32") and rounded.activations > plain.activations
    assert state_bytes(shapes, TrainerConfig(offload="nvme")) == 16 << 20
    assert optimizer_bytes(shapes, "adamw8bit") < optimizer_bytes(shapes, "muon") < optimizer_bytes(shapes)


def states(memory: RankMemory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer + memory.master_weights


def saved(shapes: ModelShapes, tokens: int, parallel: ParallelConfig = ParallelConfig(), trainer: TrainerConfig = TrainerConfig()) -> list[int]:  # noqa: B008
    return saved_by_stage(shapes, layout_of_trainer(trainer, parallel, tokens))


def test_a_rank_holds_its_part_of_what_stays_in_memory() -> None:
    shapes, paged = MODELS["llama"], {"offload": "nvme", "offload_parameters": "nvme"}

    def held(parallel: ParallelConfig, **offload: str) -> int:
        return states(predict_rank_memory(shapes, layout_of_trainer(TrainerConfig(**offload), parallel, 0)))  # type: ignore[arg-type]

    weights = weight_bytes(shapes, "float32")
    # Of weights, gradients and twice as many moments those that a stage does not cut, the parts of the others, or the pager's buffers.
    for zero, in_memory, moments in ((0, 4, 2), (1, 3, 1), (2, 2.5, 1), (3, 2, 1)):
        parallel = ParallelConfig(data=2, zero=zero)  # type: ignore[arg-type]
        assert held(parallel) == in_memory * weights
        assert held(parallel, offload="nvme") == (in_memory - moments) * weights + (16 << 20)
    layer = sum(count for count, _ in held_by_layer(shapes, 0))
    outside = sum(held_outside_layers(shapes))
    # Outside of layers weights and gradients, whole and this rank's half; of layers two and two of gradients, and halves of four.
    assert held(ParallelConfig(data=2, zero=3), **paged) == 4 * (3 * outside + 6 * layer) + (32 << 20)


def test_activations_are_divided_by_who_shares_the_tokens_and_the_layers() -> None:
    shapes = replace(MODELS["qwen3"], num_hidden_layers=4)
    (whole,) = saved(shapes, 1000)
    # What norms return is gathered for the products, which keep it: of every two tensor-parallel ranks each has it whole, in four layers and before the head.
    normed = 500 * 4 * (4 * 2 * 64 + 64)
    assert saved(shapes, 1000, ParallelConfig(context=2, tensor=2)) == [(whole // 2 - normed) // 2 + normed]
    # The residual stream and what norms return are whole on every rank: four layers of 4 h, and the last norm's input and output.
    undivided = 1000 * 4 * (4 * 4 * 64 + 2 * 64)
    assert saved(shapes, 1000, ParallelConfig(tensor=2, sequence_parallel=False)) == [undivided + (whole - undivided) // 2]
    stages, ends = ParallelConfig(pipeline=4, pipeline_layers=(1, 1, 1, 1)), 1000 * 4 * 2 * 64
    layer = (whole - ends) // 4
    assert saved(shapes, 1000, stages) == [4 * layer, 3 * layer, 2 * layer, layer + ends]
    memory = memory_by_stage(shapes, layout_of_trainer(TrainerConfig(), stages, 1000))
    assert [each.pipeline_stash for each in memory] == [3 * layer, 2 * layer, layer, 0]
    every = memory_by_stage(shapes, layout_of_trainer(TrainerConfig(), replace(stages, schedule="gpipe"), 1000, micro_batches=9))
    assert [each.pipeline_stash for each in every] == [8 * layer, 8 * layer, 8 * layer, 8 * (layer + ends)], "gpipe runs all forward passes first"
    away = TrainerConfig(offload_activations="nvme")
    assert offloaded_bytes(shapes, away, 1000) == whole
    assert offloaded_bytes(shapes, away, 1000, stages) == (4 + 3 + 2 + 1) * layer + ends
    assert offloaded_bytes(shapes, away, 1000, ParallelConfig(data=3)) == 3 * whole


def test_a_critic_has_the_predicted_bytes() -> None:
    critic = replace(MODELS["llama"], value_head="token", language_head=False)
    model = Decoder(critic, select("reference"))
    initialise(model, seed=0)
    made, parallel = make_optimizer(model, TrainerConfig()), ParallelConfig()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)
    held = resident_bytes(MODELS["llama"], TrainerConfig(), parallel, reference=False, critic=critic)
    assert held["critic"] == sum(p.nbytes for p in model.parameters()) == gradient_bytes(critic, TrainerConfig(), parallel)
    assert held["critic_optimizer"] == sum(t.nbytes for t in made.state().moments.values()) == 2 * held["critic"] < held["optimizer"]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_forward_pass_keeps_the_predicted_bytes_with_a_copy_of_the_prompt_for_each_sample_or_with_one(share_prompts: bool) -> None:
    shapes, prompt, completion, group = ModelShapes("llama", 61, 128, 6, 4, 2, 32, 384, 1024, False), 200, 25, 8
    try:
        model = Decoder(shapes, select("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    initialise(model, seed=0)
    sequences = [
        TrainSequence(str(index), (*[7] * prompt, *[index] * (completion + 1)), prompt, (0.0,) * prompt + (1.0,) * (completion + 1)) for index in range(group)
    ]
    rows, kept = collate(sequences, torch.float32, share_prompts=share_prompts), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(rows.tokens, rows.positions, rows.context)
    attended = group * (prompt + completion)
    assert len(rows.tokens) == (prompt + group * completion if share_prompts else attended) == len(hidden)
    layout = layout_of_trainer(TrainerConfig(), ParallelConfig(), len(rows.tokens), attended=attended if share_prompts else 0)
    (predicted,) = saved_by_stage(shapes, layout)
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.1)
