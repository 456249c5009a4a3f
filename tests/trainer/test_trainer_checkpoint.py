"""A checkpoint goes on bit for bit in a new process, and nothing that is damaged or half written is ever loaded."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.save import committed_steps, load_checkpoint, newest_committed, prune, save_checkpoint
from tandem.types import RunError, UserError

TRAINER = TrainerConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)

TRAIN = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(sys.argv[1])))
import conftest
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.save import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
make_model = conftest.make_model.__wrapped__()
make_batch = conftest.make_batch.__wrapped__()
trainer = TrainerConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, micro_batch_tokens=40)
algorithm = AlgorithmConfig(kl_coef=0.1)


def train(checkpoints, start, stop):
    model = make_model(torch.float32)
    optimizer = AdamW(model.named_parameters(), trainer)
    if start:
        assert load_checkpoint(checkpoints / f"step-{start}", model, optimizer) == {"step": start}
    for step in range(start, stop):
        update_policy(model, optimizer, make_batch(seed=step, step=step), algorithm, trainer)
    return model, optimizer


def save(checkpoints, step, model, optimizer, before_commit=None):
    save_checkpoint(checkpoints, step, model, optimizer, {"step": step}, before_commit=before_commit)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


checkpoints = Path(sys.argv[2])
"""


def run(code, checkpoints, expect=0):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", TRAIN + code, here, checkpoints],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=here.parent.parent,
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_three_steps_are_one_step_then_a_kill_and_two_more_in_a_new_process_bit_for_bit(tmp_path):
    run("save(checkpoints, 3, *train(checkpoints, 0, 3))", tmp_path / "straight")
    run("save(checkpoints, 1, *train(checkpoints, 0, 1)); die()", tmp_path / "killed", expect=-signal.SIGKILL)
    run("save(checkpoints, 3, *train(checkpoints, 1, 3))", tmp_path / "killed")
    for name in ("model.safetensors", "optimizer.safetensors"):
        wanted, found = (load_file(tmp_path / kind / "step-3" / name) for kind in ("straight", "killed"))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    wanted, found = (newest_committed(tmp_path / kind) for kind in ("straight", "killed"))
    assert found.digest == wanted.digest


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before_loadable(tmp_path):
    code = """
model, optimizer = train(checkpoints, 0, 1)
save(checkpoints, 1, model, optimizer)
save(checkpoints, 2, model, optimizer, before_commit=die)
"""
    run(code, tmp_path, expect=-signal.SIGKILL)
    assert any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
    assert newest_committed(tmp_path).step == 1
    run("save(checkpoints, 2, *train(checkpoints, 1, 2))", tmp_path)
    assert newest_committed(tmp_path).step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.fixture
def stepped(make_model):
    """``stepped(seed)``: a model and its optimizer after one step on random gradients."""

    def make(seed=0):
        model = make_model(torch.float32, seed)
        optimizer = AdamW(model.named_parameters(), TRAINER)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(1e-2)
        return model, optimizer

    return make


def bits(model, optimizer):
    return [p.detach().clone() for p in model.parameters()] + [t.clone() for t in optimizer.state().moments.values()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_checkpoint_brings_back_weights_moments_and_state(stepped, tmp_path):
    model, optimizer = stepped(0)
    save_checkpoint(tmp_path, 1, model, optimizer, {"prompts": 32, "name": "x"})
    other, its = stepped(1)
    assert load_checkpoint(tmp_path / "step-1", other, its) == {"prompts": 32, "name": "x"}
    assert same(bits(other, its), bits(model, optimizer))
    assert its.updates == 1


def test_companions_make_it_a_folder_of_hugging_face_with_its_names(stepped, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_checkpoint(tmp_path / "c", 1, *stepped(0), {}, companions=[tmp_path / "config.json"])
    folder = tmp_path / "c" / "step-1"
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3"}
    assert "model.layers.0.self_attn.q_proj.weight" in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_one_flipped_bit_is_refused_on_one_line_and_nothing_is_taken_over(stepped, tmp_path, name):
    save_checkpoint(tmp_path, 1, *stepped(0), {})
    path = tmp_path / "step-1" / name
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    model, optimizer = stepped(1)
    before = bits(model, optimizer)
    with pytest.raises(RunError, match=name) as caught:
        load_checkpoint(tmp_path / "step-1", model, optimizer)
    assert "\n" not in str(caught.value)
    assert same(bits(model, optimizer), before)


def test_an_uncommitted_folder_is_refused(stepped, tmp_path):
    save_checkpoint(tmp_path, 1, *stepped(0), {})
    (tmp_path / "step-1" / "COMMIT").unlink()
    with pytest.raises(RunError, match="never completed"):
        load_checkpoint(tmp_path / "step-1", *stepped(1))


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_taken_over(stepped, tmp_path):
    whole, _ = stepped(0)
    shorter = Decoder(replace(whole.shapes, num_hidden_layers=1), whole.kernels)
    save_checkpoint(tmp_path, 1, shorter, AdamW(shorter.named_parameters(), TRAINER), {})
    whole, its = stepped(1)
    before = bits(whole, its)
    with pytest.raises(UserError, match="another model"):
        load_checkpoint(tmp_path / "step-1", whole, its)
    assert same(bits(whole, its), before)


def test_the_newest_whole_checkpoint_is_found_and_damaged_ones_are_skipped(stepped, tmp_path):
    held = stepped(0)
    for step in (2, 10, 9):
        save_checkpoint(tmp_path, step, *held, {})
    assert committed_steps(tmp_path) == [2, 9, 10]
    assert newest_committed(tmp_path).step == 10
    assert newest_committed(tmp_path, at_most=9).step == 9
    (tmp_path / "step-10" / "trainer.json").write_text("{}")
    (tmp_path / "step-9" / "COMMIT").unlink()
    assert newest_committed(tmp_path).step == 2
    assert newest_committed(tmp_path / "nothing") is None


def test_pruning_keeps_the_newest_whole_checkpoints(stepped, tmp_path):
    held = stepped(0)
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, *held, {})
    (tmp_path / "step-4" / "trainer.json").unlink()
    assert prune(tmp_path, keep=2) == [1]
    assert committed_steps(tmp_path) == [2, 3, 4]
    assert newest_committed(tmp_path).step == 3


def test_saving_a_step_again_replaces_it(stepped, tmp_path):
    save_checkpoint(tmp_path, 1, *stepped(0), {})
    second = save_checkpoint(tmp_path, 1, *stepped(1), {})
    assert newest_committed(tmp_path).digest == second.digest
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


FULL = """
import resource
from tandem.types import RunError
model, optimizer = train(checkpoints, 0, 1)
save(checkpoints, 1, model, optimizer)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save(checkpoints, 2, model, optimizer)
except RunError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(tmp_path):
    said = run(FULL, tmp_path)
    assert "step-2' cannot be written: no space left" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert newest_committed(tmp_path).step == 1
