"""Training in mixed precision against torch.autocast over transformers' model, loss scaling against underflow, and the guard."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tandem.config.trainer import TrainerConfig
from tandem.kernels.mixed import in_precision
from tandem.model.huggingface.model_folder import save_model
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.step import LossShare, train_step
from tandem.types import RunError, TrainSequence

CONFIG = TrainerConfig(learning_rate=2e-3, max_grad_norm=1.0)
CPU = torch.device("cpu")


def sequences(count=8, length=24):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 41, (count, length), generator=generator)
    return [TrainSequence(str(i), tuple(row), 1, (0.0,) + (1.0,) * (length - 1)) for i, row in enumerate(ids.tolist())]


def ours(make_model, precision, steps, kernels="auto"):
    model, batch = make_model(torch.float32, kernels=kernels), sequences()
    model.kernels = in_precision(model.kernels, precision, CPU)
    optimizer, guard = AdamW(model.named_parameters(), CONFIG), GradScaler(replace(CONFIG, precision=precision))
    loss = make_cross_entropy_loss(counts_of(batch))
    return [train_step(model, optimizer, [collate(batch)], loss, 2e-3, guard=guard).metrics["sft/loss"] for _ in range(steps)]


def autocast(make_model, folder, dtype, steps):
    """The usual loop: autocast around the forward pass, fp32 weights and optimizer."""
    save_model(make_model(torch.float32, kernels="auto"), folder, eos_token_id=1)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    ids, found = torch.tensor([s.token_ids for s in sequences()]), []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def furthest(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_curve_is_as_near_to_fp32_as_that_of_an_autocast_loop(precision, make_model, tmp_path):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    whole = autocast(make_model, tmp_path / "whole", torch.float32, 25)
    theirs = autocast(make_model, tmp_path / "cast", dtype, 25)
    found = ours(make_model, precision, 25)
    assert whole[-1] < whole[0] - 0.5, "it learns, so near curves mean something"
    assert furthest(ours(make_model, "fp32", 25), whole) < 1e-4
    assert 0 < furthest(found, whole) <= 1.5 * furthest(theirs, whole)


def test_fp8_training_stays_near_fp32(make_model):
    whole, found = (ours(make_model, precision, 25) for precision in ("fp32", "fp8"))
    assert whole[-1] < whole[0] - 0.5
    assert 0 < furthest(found, whole) < 0.1 * (whole[0] - whole[-1])


@pytest.mark.parametrize(("loss_scale", "keeps"), [(1.0, False), (2.0**16, True)])
def test_a_scaled_loss_brings_gradients_through_fp16_that_would_vanish(loss_scale, keeps, make_model):
    """With a loss of a millionth, gradients are far below the smallest number of fp16."""
    batch, norms = sequences(), {}
    for precision in ("fp32", "fp16"):
        model = make_model(torch.float32, kernels="auto")
        model.kernels = in_precision(model.kernels, precision, CPU)
        settings = replace(CONFIG, precision=precision, loss_scale=loss_scale, max_grad_norm=0.0)
        plain = make_cross_entropy_loss(counts_of(batch))

        def loss(logprobs, rows, plain=plain):
            return LossShare(plain(logprobs, rows).loss * 1e-6, {}, {})

        optimizer = AdamW(model.named_parameters(), settings)
        train_step(model, optimizer, [collate(batch)], loss, 1e-3, guard=GradScaler(settings))
        norms[precision] = {name: p.grad.double() for name, p in model.named_parameters()}
    apart = math.sqrt(sum((norms["fp16"][n] - g).square().sum().item() for n, g in norms["fp32"].items()))
    whole = math.sqrt(sum(g.square().sum().item() for g in norms["fp32"].values()))
    assert (apart < 0.01 * whole) == keeps


def test_the_scale_halves_on_overflow_doubles_after_good_steps_and_ends_at_one():
    guard = GradScaler(TrainerConfig(precision="fp16", loss_scale=4.0, loss_scale_growth_steps=2, max_skipped_steps=1))
    seen = []
    for norm in (math.inf, 1.0, 1.0, math.nan, 1.0, math.nan, math.nan, math.nan, 1.0):
        seen.append((guard.judge(norm, 1.0), guard.scale))
    assert seen == [
        ("backed_off", 2.0), ("taken", 2.0), ("taken", 4.0), ("backed_off", 2.0), ("taken", 2.0), ("backed_off", 1.0),
        ("skipped", 1.0), ("skipped", 1.0), ("taken", 1.0),
    ]  # fmt: skip
    assert (guard.backed_off, guard.skipped, guard.skipped_in_a_row) == (3, 2, 0)


def test_a_guard_is_exhausted_by_skips_in_a_row_and_goes_on_from_its_state():
    config = TrainerConfig(max_skipped_steps=2)
    guard, second = GradScaler(config), GradScaler(config)
    for norm in (math.nan, math.nan, 1.0, math.inf, math.inf):
        guard.judge(norm, 1.0)
    second.load_state(guard.state())
    assert not second.is_exhausted and second.metrics() == {"train/skipped_steps": 4}
    assert second.judge(1.0, math.nan) == "skipped" and second.is_exhausted


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_counts(make_model):
    model, batch = make_model(torch.float32, kernels="auto"), sequences()
    optimizer, guard = AdamW(model.named_parameters(), CONFIG), GradScaler(CONFIG)
    plain = make_cross_entropy_loss(counts_of(batch))
    before = [p.detach().clone() for p in model.parameters()]

    def poisoned(logprobs, rows):
        share = plain(logprobs, rows)
        return share._replace(loss=share.loss * math.nan)

    result = train_step(model, optimizer, [collate(batch)], poisoned, 1e-3, guard=guard)
    assert (result.verdict, result.updated, optimizer.updates) == ("skipped", False, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert train_step(model, optimizer, [collate(batch)], plain, 1e-3, guard=guard).updated
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(RunError, match="training has diverged"):
        train_step(model, optimizer, [collate(batch)], poisoned, 1e-3)
