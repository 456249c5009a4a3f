"""AdamW with 8-bit moments: the codes against their closed form, the loss against fp32 moments, and the memory."""

import math

import torch
from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import optimizer_bytes
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.optimizers.adamw_8bit import FEWEST_CODED, AdamW8bit
from tandem.trainer.optimizers.blockwise import BLOCK, Codebook, Coded, dynamic_values
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.step import train_step

CONFIG = TrainerConfig(optimizer="adamw8bit", learning_rate=3e-3, beta2=0.95, weight_decay=0.1)


def test_the_table_has_seven_decades_whose_values_double_and_its_ends():
    signed, unsigned = dynamic_values(True).double(), dynamic_values(False).double()
    assert len(signed) == len(unsigned) == 256 and bool((signed.diff() > 0).all()) and bool((unsigned.diff() > 0).all())
    assert signed[-1] == unsigned[-1] == 1 and 0 in signed and unsigned[0] == 0
    for decade in range(7):
        low, high = 10.0 ** (decade - 7), 10.0 ** (decade - 6)
        assert int(((signed > low) & (signed < high)).sum()) == int(((signed < -low) & (signed > -high)).sum()) == 2**decade
        assert int(((unsigned > low) & (unsigned < high)).sum()) == 2 ** (decade + 1)
    # The largest decade, signed: 64 steps of 0.9 / 64, at their middles.
    assert math.isclose(signed[-2], 1 - 0.9 / 128, rel_tol=1e-6)


def test_a_number_is_coded_as_the_nearest_of_its_blocks_values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * BLOCK + 17, generator=generator) * torch.logspace(-6, 3, 3 * BLOCK + 17)
    book = Codebook(True, torch.device("cpu"))
    coded = book.encode(x)
    assert coded.codes.dtype == torch.uint8 and len(coded.scales) == 4
    found = book.decode(coded)
    for start in range(0, len(x), BLOCK):
        block, largest = x[start : start + BLOCK], x[start : start + BLOCK].abs().max()
        distance = (block[:, None] / largest - book.values).abs()
        assert torch.allclose((found[start : start + BLOCK] / largest - block / largest).abs(), distance.amin(1), rtol=0, atol=1e-7)


def test_a_second_moment_never_becomes_zero_and_zeros_stay_zero():
    book = Codebook(False, torch.device("cpu"))
    x = torch.zeros(2 * BLOCK)
    x[0], x[1] = 1.0, 1e-20
    found = book.decode(book.encode(x))
    assert found[1] > 0 and found[0] == 1 and not found[2:].any()
    assert isinstance(book.encode(x), Coded)


def test_parameters_of_float64_take_the_steps_of_fp32_up_to_rounding():
    """One gradient in a block: each moment is its block's largest, which is coded without an error."""
    start, taken = torch.randn(64, 80), []
    for dtype in (torch.float32, torch.float64):
        weight = nn.Parameter(start.to(dtype, copy=True))
        optimizer = AdamW8bit([("w", weight)], CONFIG)
        for step in range(3):
            weight.grad = (0.3 ** (torch.arange(weight.numel()) // BLOCK % 5 + step)).view_as(weight).to(dtype)
            optimizer.step(1e-2)
        assert any(name.startswith("exp_avg_codes") for name in optimizer.state().moments)
        taken.append(weight.detach().double() - start.double())
    assert (taken[0] - taken[1]).abs().max() < 2e-6 < 1e-3 < taken[1].abs().min()


def test_small_parameters_and_the_embedding_have_the_bits_of_adamw():
    held = {"embed": nn.Parameter(torch.randn(100, 64)), "small": nn.Parameter(torch.randn(FEWEST_CODED - 1))}
    other = {name: nn.Parameter(p.detach().clone()) for name, p in held.items()}
    ours, plain = AdamW8bit(held.items(), CONFIG, whole=("embed",)), AdamW(other.items(), CONFIG)
    for step in range(3):
        for each, its in ((held, ours), (other, plain)):
            generator = torch.Generator().manual_seed(step)
            for parameter in each.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            its.step(0.01)
    assert all(torch.equal(held[name], other[name]) for name in held)


def losses(make_model, batch, config, steps, optimizer_of):
    model = make_model(torch.float32)
    optimizer = optimizer_of(model)
    sequences = [s for s in batch.sequences if any(s.loss_mask)]
    found = []
    for _ in range(steps):
        loss = make_cross_entropy_loss(counts_of(sequences))
        found.append(train_step(model, optimizer, [collate(sequences)], loss, config.learning_rate).metrics["sft/loss"])
    return found, model, optimizer


def test_the_loss_follows_whole_moments_at_a_quarter_of_their_bytes(make_model, make_batch, monkeypatch):
    monkeypatch.setattr("tandem.trainer.optimizers.adamw_8bit.FEWEST_CODED", 1024)
    batch = make_batch()
    whole, _, plain = losses(make_model, batch, CONFIG, 40, lambda model: AdamW(model.named_parameters(), CONFIG))
    coded, _, ours = losses(make_model, batch, CONFIG, 40, lambda model: AdamW8bit(model.named_parameters(), CONFIG))
    assert whole[-1] < 0.5 * whole[0], "it learns, so near curves mean something"
    assert max(abs(a - b) for a, b in zip(whole, coded, strict=True)) < 0.05 * whole[0]
    assert coded != whole
    sizes = {name: sum(t.nbytes for t in optimizer.state().moments.values()) for name, optimizer in (("plain", plain), ("ours", ours))}
    assert sizes["ours"] < 0.27 * sizes["plain"]


def test_a_state_read_back_goes_on_bit_for_bit_and_has_the_predicted_bytes(make_model, make_batch):
    sequences = [s for s in make_batch().sequences if any(s.loss_mask)]
    loss = make_cross_entropy_loss(counts_of(sequences))
    model = make_model(torch.float32)
    optimizer = make_optimizer(model, CONFIG)
    for _ in range(2):
        train_step(model, optimizer, [collate(sequences)], loss, 0.01)
    other = make_model(torch.float32)
    other.load_state_dict(model.state_dict())
    second = make_optimizer(other, CONFIG)
    second.load_state(optimizer.state())
    for each, its in ((model, optimizer), (other, second)):
        for _ in range(2):
            train_step(each, its, [collate(sequences)], loss, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert sum(t.nbytes for t in optimizer.state().moments.values()) == optimizer_bytes(model.shapes, "adamw8bit")
