"""The state of a decoder and its optimizer in a checkpoint: the names of the whole model, every element once, restored bit for bit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import to_huggingface
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import newest_whole
from tandem.trainer.checkpoint.model_state import load_state, parts_of, run_shards, state_shards
from tandem.trainer.checkpoint.random_states import random_states, restore_random_states
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.optimizers.adamw import AdamW, Optimizer
from tandem.trainer.optimizers.make import make_optimizer
from tandem.types import UserError

ALONE = Communicator("world", 0, 1, None, 60.0)
DENSE = ModelShapes("qwen2", 41, 64, 2, 4, 2, 16, 96, 64, True, attention_bias=True)
MIXTURE = ModelShapes("qwen3_moe", 41, 64, 2, 4, 2, 16, 96, 64, False, qk_norm=True, experts=ExpertShapes(4, 2, 80))
TRAINER = TrainerConfig(learning_rate=1e-2, weight_decay=0.1)


def stepped(shapes: ModelShapes, config: TrainerConfig = TRAINER, seed: int = 0) -> tuple[Decoder, Optimizer]:
    model = Decoder(shapes, select("reference"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = make_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(1e-2)
    return model, optimizer


def save(folder: Path, model: Decoder, optimizer: Optimizer) -> Contents:
    checkpointer = Checkpointer(folder, 1, ALONE, {}, asynchronous=False)
    checkpointer.save(1, state_shards(model, optimizer), {"updates": optimizer.updates})
    checkpointer.close()
    found = newest_whole(folder, ALONE)
    assert found is not None
    return Contents(found.folder, found.manifest)


@pytest.mark.parametrize("shapes", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_weights_and_moments_have_the_names_and_shapes_of_the_whole_model(shapes: ModelShapes, tmp_path: Path) -> None:
    model, optimizer = stepped(shapes)
    save(tmp_path, model, optimizer)
    held = {name.partition("[")[0]: t for name, t in load_file(tmp_path / "step-1" / "rank-00000.safetensors").items()}
    names = [name for name, _ in parameters(shapes)]
    assert set(held) == {f"{kind}/{name}" for kind in ("weights", "exp_avg", "exp_avg_sq") for name in names}
    assert all(torch.equal(held[f"weights/{name}"], tensor) for name, tensor in to_huggingface(model))
    # The optimizer has only the stacked matrix: rows of queries, then keys, then values.
    stacked = optimizer.state().moments["exp_avg/layers.1.qkv_proj.weight"]
    parts = [held[f"exp_avg/model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert [len(part) for part in parts] == [64, 32, 32] and torch.equal(torch.cat(parts), stacked)
    if shapes.experts is not None:
        both = optimizer.state().moments["exp_avg_sq/layers.0.experts.gate_up_proj"]
        assert torch.equal(held["exp_avg_sq/model.layers.0.mlp.experts.3.up_proj.weight"], both[3, 80:])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
@pytest.mark.parametrize("shapes", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_state_of_every_optimizer_comes_back_bit_for_bit(shapes: ModelShapes, optimizer: str, tmp_path: Path) -> None:
    config = replace(TRAINER, optimizer=optimizer)  # type: ignore[arg-type]
    model, its = stepped(shapes, config)
    contents = save(tmp_path, model, its)
    other, theirs = stepped(shapes, config, seed=1)
    load_state(contents, other, theirs, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    wanted, found = its.state(), theirs.state()
    assert found.updates == 1 and wanted.moments.keys() == found.moments.keys() and len(wanted.moments) > 10
    assert all(torch.equal(found.moments[name], tensor) for name, tensor in wanted.moments.items())


def test_runs_of_a_stacked_parameter_make_the_same_shards_as_the_whole_of_it() -> None:
    model, optimizer = stepped(MIXTURE)
    parts = parts_of(model)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        whole = {part.name: torch.full(part.whole, torch.nan) for part in parts if part.parameter == name}
        cuts = [0, flat.numel() // 3 + 1, flat.numel() // 2, flat.numel()]
        for first, last in itertools.pairwise(cuts):
            for shard in run_shards(parts, "weights", name, first, flat[first:last]):
                assert whole[shard.key.name][shard.offsets.slices].isnan().all()
                whole[shard.key.name][shard.offsets.slices] = shard.tensor
        wanted = dict(to_huggingface(model))
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in whole.items())
    assert isinstance(optimizer, AdamW)


def test_checkpoint_of_another_model_is_refused_in_one_line_and_nothing_is_taken_over(tmp_path: Path) -> None:
    contents = save(tmp_path, *stepped(DENSE))
    for shapes in (
        replace(DENSE, num_hidden_layers=1), replace(DENSE, num_hidden_layers=3), replace(DENSE, intermediate_size=64),
        replace(DENSE, tie_word_embeddings=False)
    ):
        model, optimizer = stepped(shapes, seed=1)
        before = [p.detach().clone() for p in model.parameters()] + [t.clone() for t in optimizer.state().moments.values()]
        with pytest.raises(UserError, match="is of another model") as caught:
            load_state(contents, model, optimizer, 1)
        assert "\n" not in str(caught.value)
        after = [*model.parameters(), *optimizer.state().moments.values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_random_numbers_go_on_where_they_were() -> None:
    states = random_states()
    first = torch.rand(5)
    torch.rand(3)
    restore_random_states(states)
    assert torch.equal(torch.rand(5), first)
