"""Training of an EAGLE-3 draft head beside a frozen model, from text and from the rollouts of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from byte_model import write_byte_model
from data_runs import rows
from safetensors.torch import load_file

from tandem.config.recipe import load_config
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.jobs.data_run.draft_inputs import rollouts_of
from tandem.jobs.start import dry_run, resume, train
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason, RunError, Sample, UserError, WeightVersion

EXAMPLES = [{"prompt": f"{i}+{i}=", "completion": f"{i + i}, as {i} and {i} are"} for i in range(1, 17)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model and a dataset of examples, whose completions are learned."""
    folder = tmp_path_factory.mktemp("data")
    write_byte_model(folder / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "source").mkdir()
    (folder / "source" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))
    form = DocumentFormat(suffixes=(), examples=True)
    tokenize(TokenizeSettings(str(folder / "source"), str(folder / "examples"), str(folder / "model"), form, workers=1))
    return folder


def write_recipe(folder: Path, data: Path, /, **changed: Any) -> Path:
    sections: dict[str, Any] = {
        "algorithm": {"name": "draft", "draft_steps": 3},
        "model": {"path": str(data / "model")},
        "data": {"train": [{"path": str(data / "examples")}], "held_out": str(data / "examples"), "sequence_length": 48, "global_batch_size": 8},
        "trainer": {"learning_rate": 1.0e-2, "warmup_steps": 2, "weight_decay": 0.0, "micro_batch_tokens": 128},
        "evaluation": {"every_steps": 20},
        "checkpoint": {"every_steps": 2, "keep": 2, "asynchronous": False},
        "run": {"max_steps": 4, "seed": 3, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    for name, values in changed.items():
        sections[name] = {**sections.get(name, {}), **values}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return folder / "recipe.yaml"


class StopAt(Callback):
    """Asks to stop after so many rows."""

    def __init__(self, count: int) -> None:
        self.left = count

    def row(self, row: Any) -> None:
        self.left -= 1

    def wants_stop(self) -> bool:
        return self.left <= 0


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.full
def test_a_stopped_run_has_the_bits_of_an_undisturbed_one_and_its_head_has_vllms_tensors(data: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    assert "predicted memory" in dry_run(load_config(recipe := write_recipe(tmp_path / "whole", data)), recipe)
    result = train(load_config(write_recipe(tmp_path / "whole", data)), progress=False)
    assert "eagle3" in result.commands[0]
    with pytest.raises(RunError, match="wants_stop stopped the run, which is saved"):
        train(load_config(write_recipe(tmp_path / "stopped", data)), progress=False, callbacks=[StopAt(2)])
    assert len(rows(tmp_path / "stopped" / "run")) < 4
    resume(tmp_path / "stopped" / "run", progress=False)
    assert rows(tmp_path / "whole" / "run") == rows(tmp_path / "stopped" / "run")
    whole, resumed = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert {"fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight", "d2t", "t2d"} <= set(whole)
    assert "embed_tokens.weight" not in whole


def write_rollouts(run: Path) -> None:
    """Writes a run's journal with the samples of two steps."""
    run.mkdir()
    with Journal(run / "journal.sqlite") as journal:
        for step in range(2):
            made = []
            for index in range(4):
                prompt, drawn = (40 + step, 41, 42), tuple(range(50 + index, 58 + index))
                nothing, mask = (0.0,) * len(drawn), (True,) * 7 + (False,)
                versions = tuple(WeightVersion(0, step) if own else None for own in mask)
                made.append(Sample(f"{step}/p/{index}", "p", index, prompt, drawn, nothing, nothing, versions, FinishReason.STOP, "", mask))
            journal.commit_samples(step, made)


def test_rollouts_are_the_prompts_and_completions_of_the_newest_steps_and_only_sampled_tokens_are_learned(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "grpo")
    every, newest = list(rollouts_of(tmp_path / "grpo", 0)), list(rollouts_of(tmp_path / "grpo", 1))
    assert len(every) == 8 and newest == every[4:]
    assert newest[0] == ([41, 41, 42, 50, 51, 52, 53, 54, 55, 56, 57], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0])


STEADY = {"learning_rate": 5.0e-3, "schedule": "cosine"}


@pytest.mark.full
def test_a_head_learns_from_rollouts_goes_on_from_another_and_drafts_what_an_untrained_one_does_not(data: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "grpo")
    for name, first in (("first", ""), ("second", str(tmp_path / "first" / "run" / "model"))):
        (tmp_path / name).mkdir()
        own = {"train": [], "held_out": "", "rollouts": [str(tmp_path / "grpo")]}
        recipe = write_recipe(tmp_path / name, data, data=own, algorithm={"init_from": first}, run={"max_steps": 200}, trainer=STEADY)
        train(load_config(recipe), progress=False)
    begun, more = rows(tmp_path / "first" / "run"), rows(tmp_path / "second" / "run")
    assert begun[0]["draft/acceptance/0"] < 0.1 and begun[-1]["draft/acceptance/0"] > 0.8 and begun[-1]["draft/acceptance/2"] > 0.6
    # The loss has the entropy of the target's distribution in it, which no head can lower.
    assert more[0]["draft/acceptance/0"] > 0.8 and more[0]["train/loss"] < begun[0]["train/loss"]


def test_what_a_head_cannot_be_trained_with_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'parallel.world' is 2 and algorithm.name is 'draft', which trains a head beside one whole model; set it to 1"):
        load_config(write_recipe(tmp_path, data, parallel={"data": 2}))
    with pytest.raises(UserError, match="is not the folder of a run; name one of reinforcement learning"):
        list(rollouts_of(tmp_path / "nowhere", 0))
    with pytest.raises(UserError, match=r"'data.rollouts' is .*, which is not read: algorithm.name is 'sft'; set algorithm.name to draft"):
        load_config(write_recipe(tmp_path, data, algorithm={"name": "sft", "draft_steps": 5}, data={"rollouts": ["runs/grpo"]}))
