"""Weights, gradients and activations in files: the bits of a step in memory, at most two layers of weights in memory, and the predicted
memory."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.model.families import mixtral
from tandem.model.initialise import initialise
from tandem.trainer.offload import activations, pager
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.types import RunError, UserError

LLAMA = ModelShapes("llama", 61, 48, 4, 4, 2, 16, 80, 128, False, attention_bias=True, output_bias=True, mlp_bias=True)
QWEN3 = ModelShapes("qwen3", 61, 48, 4, 4, 2, 16, 80, 128, True, qk_norm=True)
MIXTRAL = ModelShapes("mixtral", 61, 48, 3, 4, 2, 16, 48, 128, False, experts=ExpertShapes(4, 2, 48, names=mixtral.NAMES))
CONFIG = TrainerConfig(learning_rate=0.01, weight_decay=0.1, offload="nvme", offload_parameters="nvme")
LENGTHS = ((23, 1, 40, 9), (30, 5))


@pytest.fixture(params=["reference", "cpu"])
def kernels(request):
    try:
        return select(request.param)
    except UserError as error:
        pytest.skip(str(error))


def backward(model, lengths, seed, scale=1.0):
    tokens = torch.randint(0, 61, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    hidden = model(tokens, positions, PackedContext(bounds, max(lengths)))
    loss = model.token_logprobs(hidden, torch.arange(len(tokens)), tokens, 1.0, len(tokens)).raw.square().mean() * scale
    loss.backward()
    return loss.item()


def step(model, optimizer, number, scale):
    """Takes two micro-batches and an update; returns losses and the gradient norm."""
    optimizer.zero_grad()
    losses = [backward(model, lengths, 10 * number + place, scale) for place, lengths in enumerate(LENGTHS)]
    norm = optimizer.clip(scale)
    optimizer.step(0.01 * (number + 1))
    return [*losses, norm]


def made(shapes, kernels):
    model = Decoder(shapes, kernels)
    initialise(model, 0, 0.2)
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shapes", [LLAMA, QWEN3, MIXTRAL], ids=lambda s: s.architecture)
def test_paged_layers_have_the_bits_of_layers_in_memory(kernels, shapes, recompute, tmp_path, monkeypatch):
    monkeypatch.setattr(pager, "PIECE", 1024)
    plain, paged = made(shapes, kernels), made(shapes, kernels)
    plain.recompute = paged.recompute = recompute
    adamw, optimizer = AdamW(plain.named_parameters(), CONFIG), PagedAdamW(paged.named_parameters(), CONFIG, tmp_path, paged)
    for number, scale in enumerate((1.0, 1.0, 4096.0)):
        wanted = step(plain, adamw, number, scale)
        assert wanted[-1] > 1, "gradients are clipped"
        assert step(paged, optimizer, number, scale) == wanted
    weights = optimizer.weights()
    assert all(torch.equal(weights[name], p) for name, p in plain.named_parameters())
    assert all(torch.equal(optimizer.state().moments[name], tensor) for name, tensor in adamw.state().moments.items())


def test_at_most_two_layers_are_in_memory_and_none_between_steps(tmp_path):
    model = made(QWEN3, select("reference"))
    optimizer = PagedAdamW(model.named_parameters(), CONFIG, tmp_path, model)
    seen = []

    def held():
        # Memory that was returned to the system reads as zeros.
        return {index for index, layer in enumerate(model.layers) if layer.o_proj.weight.any()}

    around = model.around_layer
    model.around_layer = lambda index, layer, x, residual: around(index, lambda *state: (seen.append((index, held())), layer(*state))[1], x, residual)
    for index, layer in enumerate(model.layers):
        layer.o_proj.weight.register_hook(lambda gradient, index=index: seen.append((index, held())))
    step(model, optimizer, 0, 1.0)
    forward, back = [(i, i + 1) for i in range(4)], [(i, i - 1) for i in (3, 2, 1, 0)]
    assert [index for index, _ in seen] == [index for index, _ in [*forward, *back] * 2]
    # The next one may still be in transfer.
    assert all({index} <= here <= {index, following} for (index, here), (_, following) in zip(seen, [*forward, *back] * 2, strict=True))
    assert held() == set()
    assert all(p.grad is None for name, p in model.named_parameters() if "layers" in name)
    with torch.no_grad():
        model(torch.arange(9), torch.arange(9), PackedContext(torch.tensor([0, 9], dtype=torch.int32), 9))
    assert held() == set()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shapes", [LLAMA, QWEN3, MIXTRAL], ids=lambda s: s.architecture)
def test_activations_in_a_file_give_the_same_gradients(kernels, shapes, recompute, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    plain, paged = made(shapes, kernels), made(shapes, kernels)
    plain.recompute = paged.recompute = recompute
    pages = ActivationOffload(paged, tmp_path, 1000, in_flight_bytes=1 << 14)
    for seed, lengths in enumerate(LENGTHS):
        assert backward(paged, lengths, seed) == backward(plain, lengths, seed)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(paged.parameters(), plain.parameters(), strict=True))
    if kernels.name == "cpu" and recompute == "none":
        # Except for integers of routing and bounds.
        (predicted,) = saved_by_stage(shapes, layout_of_trainer(TrainerConfig(), ParallelConfig(), sum(LENGTHS[-1])))
        assert predicted * 0.8 < pages.written_bytes < 1.2 * predicted
    assert list(tmp_path.iterdir()) == []


def test_activations_survive_a_file_that_is_read_back_twice_and_refuse_a_late_backward(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    plain, paged = made(QWEN3, select("reference")), made(QWEN3, select("reference"))
    ActivationOffload(paged, tmp_path, 0, in_flight_bytes=1)
    found = []
    for model in (plain, paged):
        hidden = model(torch.arange(9), torch.arange(9), PackedContext(torch.tensor([0, 9], dtype=torch.int32), 9))
        hidden.square().sum().backward(retain_graph=True)
        hidden.sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    early = paged(torch.arange(9), torch.arange(9), PackedContext(torch.tensor([0, 9], dtype=torch.int32), 9))
    paged(torch.arange(9), torch.arange(9), PackedContext(torch.tensor([0, 9], dtype=torch.int32), 9))
    with pytest.raises(RuntimeError, match="a later forward pass has replaced them"):
        early.sum().backward()


def test_a_disk_that_fills_up_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    model = made(QWEN3, select("reference"))
    ActivationOffload(model, tmp_path, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"No space left.*trainer\.offload_folder.*trainer\.micro_batch_tokens") as caught:
        backward(model, LENGTHS[0], 0)
    assert len(str(caught.value).splitlines()) == 1


MEASURE = """
import sys, torch
from pathlib import Path
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory, saved_by_stage
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.runtime.machine.heap import freed_memory_kept
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.offload.activations import ActivationOffload

torch.set_num_threads(1)
(LAYERS, HIDDEN, TOKENS), OFFLOADED = map(int, sys.argv[2:5]), sys.argv[5:]

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def train(layers, hidden, tokens, config):
    shapes = ModelShapes("qwen3", 64, hidden, layers, 8, 4, 64, 3 * hidden, 4096, True, qk_norm=True)
    model, layout = Decoder(shapes, select("auto")), layout_of_trainer(config, ParallelConfig(), tokens)
    optimizer = make_optimizer(model, config, Path(sys.argv[1]), is_filled=config.offload_parameters == "none")
    if config.offload_activations == "nvme":
        ActivationOffload(model, Path(sys.argv[1]), sum(saved_by_stage(shapes, layout)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if config.offload_parameters == "nvme":
                optimizer.put("weights", name, 0.02 * torch.ones(p.shape))
            else:
                p.fill_(0.02)
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    for _ in range(2):
        optimizer.zero_grad()
        hidden = model(torch.arange(tokens) % 64, torch.arange(tokens), PackedContext(bounds, tokens))
        model.token_logprobs(hidden, torch.arange(tokens), torch.arange(tokens) % 64, 1.0, tokens).raw.mean().backward()
        del hidden
        optimizer.clip()
        optimizer.step(1e-3)
    predicted = predict_rank_memory(shapes, layout)
    return predicted.allocated - predicted.staged - predicted.fragmentation

with freed_memory_kept():
    train(1, 32, 8, TrainerConfig())  # the first step of a process loads modules and libraries too
    before = resident()
    predicted = train(LAYERS, HIDDEN, TOKENS, TrainerConfig(**{name: "nvme" for name in OFFLOADED}))
    print(resident() - before, predicted)
"""


def measured(folder, layers, hidden, tokens, *offloaded):
    """Returns (resident bytes after two steps, predicted bytes) of a separate process. It keeps freed memory, so they are the peak."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(layers), str(hidden), str(tokens), *offloaded]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found, predicted = map(int, done.stdout.split())
    return found, predicted


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read resident memory")
def test_resident_memory_is_that_of_two_layers_and_as_predicted(tmp_path):
    plain, of_plain = measured(tmp_path, 12, 512, 16)
    paged, of_paged = measured(tmp_path, 12, 512, 16, "offload", "offload_parameters")
    assert 0.8 * of_plain < plain < 1.2 * of_plain
    assert 0.5 * of_paged < paged < 1.5 * of_paged and paged < plain / 4, (plain, paged)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read resident memory")
def test_resident_memory_is_smaller_by_the_activations(tmp_path):
    plain, of_plain = measured(tmp_path, 16, 256, 2048)
    paged, of_paged = measured(tmp_path, 16, 256, 2048, "offload_activations")
    # The workspace of kernels is the same in both; what the C library keeps between two allocations is not.
    saved = of_plain - of_paged
    assert saved > 500 << 20 and 0.7 * saved < plain - paged < 1.3 * saved, (plain, paged)
