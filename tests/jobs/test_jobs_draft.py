"""Training of an EAGLE-3 draft head beside a frozen model, from text and from the rollouts of a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from byte_model import write_byte_model
from data_runs import command, forget_end, refused, rows, write_sections
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.backends.environment import installed, python_of
from tandem.backends.vllm.arguments import environment
from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.jobs.data_run.draft_inputs import rollouts_of
from tandem.jobs.result import Figure
from tandem.jobs.start import dry_run, resume, train
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import initialise_eagle3, save_eagle3
from tandem.model.huggingface.model_config import read_shapes
from tandem.planner.automatic import with_layout
from tandem.planner.recipe_layout import predicted_memory, recipe_layout
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import room
from tandem.runtime.records.journal import Journal
from tandem.text.tokenizer import Tokenizer
from tandem.types import FinishReason, RunError, Sample, UserError, WeightVersion

EXAMPLES = [{"prompt": f"{i}+{i}=", "completion": f"{i + i}, as {i} and {i} are"} for i in range(1, 17)]
ASKED = [f"{i}+{i}=" for i in range(1, 9)]
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def is_installed() -> bool:
    try:
        return installed("vllm") is not None
    except UserError:
        return False


PROGRAM = (sys.executable, "-m", "tandem.cli.main")


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
        "algorithm": {"name": "draft", "draft_steps": 3, "draft_vocab_size": 200},
        "model": {"path": str(data / "model")},
        "data": {"train": [{"path": str(data / "examples")}], "held_out": str(data / "examples"), "sequence_length": 48, "global_batch_size": 8},
        "trainer": {"learning_rate": 1.0e-2, "warmup_steps": 2, "weight_decay": 0.0, "micro_batch_tokens": 128},
        "evaluation": {"every_steps": 20},
        "checkpoint": {"every_steps": 2, "keep": 2, "asynchronous": False},
        "run": {"max_steps": 4, "seed": 3, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    return write_sections(folder, sections, changed)


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
    with Journal(tmp_path / "whole" / "run" / "journal.sqlite", read_only=True) as journal:
        first, last = (measured for _, kind, measured in journal.evaluations() if kind == "held_out_drafts")
    # By hand: a step draws one token, and another for each draft that is accepted with all before it.
    by_position = [last[f"acceptance/{position}"] for position in range(3)]
    assert last["acceptance_length"] == pytest.approx(1 + by_position[0] * (1 + by_position[1] * (1 + by_position[2])))
    assert result.figures == {name: Figure(first[name], last[name]) for name in ("loss", "acceptance_length")}
    said = f"acceptance length {first['acceptance_length']:.2f} -> {last['acceptance_length']:.2f}"
    assert said in result.summary() and "perplexity" not in result.summary()
    shown = result.report.read_text()
    assert "held-out acceptance length, tokens" in shown and f"acceptance length {first['acceptance_length']:.2f} before" in shown
    with pytest.raises(RunError, match="wants_stop stopped the run, which is saved"):
        train(load_config(write_recipe(tmp_path / "stopped", data)), progress=False, callbacks=[StopAt(2)])
    assert len(rows(tmp_path / "stopped" / "run")) < 4
    resume(tmp_path / "stopped" / "run", progress=False)
    assert rows(tmp_path / "whole" / "run") == rows(tmp_path / "stopped" / "run")
    whole, resumed = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert {"fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight", "d2t", "t2d"} <= set(whole)
    assert "embed_tokens.weight" not in whole and whole["lm_head.weight"].shape == (200, 32)


def write_large(folder: Path, data: Path, **changed: Any) -> Path:
    """Writes a recipe whose model and head need more memory than the process."""
    model = folder / "model"
    shutil.copytree(data / "model", model)
    config = Qwen3Config.from_pretrained(model)
    config.update({"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 256})
    config.update({"num_hidden_layers": 12, "layer_types": ["full_attention"] * 12})
    Qwen3ForCausalLM(config).save_pretrained(model)
    source = Path(__file__).parents[2] / "tandem" / "layout"
    tokenize(TokenizeSettings(str(source), str(folder / "text"), str(model), DocumentFormat(suffixes=(".py",)), workers=1))
    text = {"train": [{"path": str(folder / "text")}], "held_out": "", "sequence_length": 256, "global_batch_size": 8}
    algorithm, trainer = {"draft_vocab_size": 4096}, {"micro_batch_tokens": 1024}
    return write_recipe(folder, data, model={"path": str(model)}, data=text, algorithm=algorithm, trainer=trainer, run={"max_steps": 3}, **changed)


def peak_of(recipe: Path) -> int:
    """Trains ``recipe`` and returns the peak of the resident bytes of its largest process."""
    process = subprocess.Popen([*PROGRAM, "train", str(recipe)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return 1024 * usage.ru_maxrss


@pytest.mark.full
def test_the_peak_of_a_run_is_within_a_quarter_of_the_prediction_which_counts_what_the_head_needs_and_not_the_model(data: Path, tmp_path: Path) -> None:
    recipe = write_large(tmp_path, data)
    shapes, loaded = read_shapes(tmp_path / "model"), load_config(recipe)
    predicted = predict_rank_memory(shapes, recipe_layout(loaded, shapes, on_cpu=True)).total
    (said,) = [line for line in dry_run(loaded, recipe).splitlines() if line.startswith("predicted memory: ")]
    assert int(said.split()[2].replace(",", "")) == pytest.approx(predicted / 2**20, abs=2)
    peak = peak_of(recipe)
    assert predicted / 1.25 < peak < 1.25 * predicted, (predicted, peak)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"tensor": 2}, {"data": 2}], ids=str)
def test_the_peak_of_the_rank_that_has_the_head_is_within_a_quarter_of_the_prediction(mesh: dict[str, Any], data: Path, tmp_path: Path) -> None:
    recipe = write_large(tmp_path, data, parallel=mesh, machine={"threads": 2})
    shapes = read_shapes(tmp_path / "model")
    predicted, peak = predict_rank_memory(shapes, recipe_layout(load_config(recipe), shapes, on_cpu=True)).total, peak_of(recipe)
    assert predicted / 1.25 < peak < 1.25 * predicted, (predicted, peak)


def test_tandem_plan_names_the_command_that_predicts_a_run_and_an_automatic_layout_has_no_more_parts_than_the_model_needs(data: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    shutil.copytree(data / "model", deep)
    config = Qwen3Config.from_pretrained(deep)
    config.update({"num_hidden_layers": 60, "layer_types": ["full_attention"] * 60})
    config.save_pretrained(deep)
    recipe = write_recipe(tmp_path, data, parallel={"layout": "auto"}, model={"path": str(deep)})
    assert "whose layouts are not compared; 'tandem train " in refused("plan", str(recipe))
    h100 = load_hardware("H100-80GB")
    chosen, line = with_layout(load_config(recipe), ["NVIDIA H100 80GB HBM3"] * 4, h100, 2)
    assert (chosen.parallel.data, chosen.parallel.tensor, chosen.parallel.zero) == (4, 1, 1) and line.startswith("layout: data 4, tensor 1, zero 1 ")
    chosen.check()
    assert isinstance(chosen, PretrainRecipe)
    alone, halved = (predicted_memory(replace(chosen, parallel=ParallelConfig(data=4 // tensor, tensor=tensor, zero=1))) for tensor in (1, 2))
    # A GPU with room for a half of the model and the head.
    small = replace(h100, memory_bytes=next(size for size in range(2**30, 2**34, 2**12) if halved <= room(size)))
    assert halved <= room(small.memory_bytes) < alone
    chosen, line = with_layout(load_config(recipe), ["NVIDIA H100 80GB HBM3"] * 4, small, 2)
    assert (chosen.parallel.data, chosen.parallel.tensor) == (2, 2) and line.startswith("layout: data 2, tensor 2, zero 1 ")
    chosen.check()


def write_samples(run: Path, steps: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]], last_is_sampled: bool = True) -> None:
    """Writes a run's journal with the samples, a prompt and what was drawn, of its ``steps``. ``last_is_sampled``: or their last tokens are not."""
    run.mkdir()
    with Journal(run / "journal.sqlite") as journal:
        for step, drawn_of_step in enumerate(steps):
            made = []
            for index, (prompt, drawn) in enumerate(drawn_of_step):
                nothing, mask = (0.0,) * len(drawn), (True,) * (len(drawn) - 1) + (last_is_sampled,)
                versions = tuple(WeightVersion(0, step) if own else None for own in mask)
                made.append(Sample(f"{step}/p/{index}", "p", index, prompt, drawn, nothing, nothing, versions, FinishReason.STOP, "", mask))
            journal.commit_samples(step, made)


def write_rollouts(run: Path) -> None:
    """Writes a run's journal with the samples of two steps."""
    write_samples(run, [[((40 + step, 41, 42), tuple(range(50 + index, 58 + index))) for index in range(4)] for step in range(2)], last_is_sampled=False)


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
        recipe = write_recipe(tmp_path / name, data, data=own, algorithm={"init_from": first, "draft_vocab_size": 0}, run={"max_steps": 200}, trainer=STEADY)
        train(load_config(recipe), progress=False)
    begun, more = rows(tmp_path / "first" / "run"), rows(tmp_path / "second" / "run")
    assert begun[0]["draft/acceptance/0"] < 0.1 and begun[-1]["draft/acceptance/0"] > 0.8 and begun[-1]["draft/acceptance/2"] > 0.6
    # Every step reads all samples, and the last ones change little: the second run begins where the first one ended. The loss has the entropy of the
    # target's distribution in it, which no head can lower.
    learned = begun[0]["train/loss"] - begun[-1]["train/loss"]
    assert abs(more[0]["train/loss"] - begun[-1]["train/loss"]) < 0.02 * learned
    assert all(abs(more[0][f"draft/acceptance/{place}"] - begun[-1][f"draft/acceptance/{place}"]) < 0.1 for place in range(3))

@pytest.fixture(scope="module")
def target(data: Path) -> Path:
    """A folder of a model whose greedy answers are not one repeated token, with three layers to read and the head size that vLLM computes on a CPU."""
    folder = data / "target"
    shutil.copytree(data / "model", folder)
    config = Qwen3Config.from_pretrained(data / "model")
    config.update({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "head_dim": 32, "tie_word_embeddings": False, "initializer_range": 0.4})
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(target: Path) -> list[list[int]]:
    """The greedy answers of the target to ``ASKED``."""
    with LLM(target, max_num_seqs=8) as llm:
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(ASKED, GREEDY)]


@pytest.fixture(scope="module")
def run(target: Path, answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``tandem train`` on the target's answers, as the journal of another run has them, that Ctrl-C stopped and ``tandem resume`` ended."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = Tokenizer.from_folder(target)
    write_samples(folder / "grpo", [[(tuple(tokenizer.encode(asked)), tuple(answer)) for asked, answer in zip(ASKED, answers, strict=True)]])
    own = {"train": [], "held_out": "", "rollouts": [str(folder / "grpo")]}
    registered = {"path": str(folder / "registry"), "name": "head"}
    recipe = write_recipe(folder, target.parent, model={"path": str(target)}, data=own, run={"max_steps": 150}, trainer=STEADY, registry=registered)
    process = subprocess.Popen([*PROGRAM, "train", str(recipe)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 200
    while not (folder / "run" / "metrics.jsonl").exists() or len(rows(folder / "run")) < 5:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 130 and "tandem resume" in said, said
    assert len(rows(folder / "run")) < 150
    # The run has a copy of what it has read of it.
    shutil.rmtree(folder / "grpo")
    assert "speculative-config" in command("resume", str(folder / "run"))
    assert len(rows(folder / "run")) == 150
    return folder / "run"


def drafted(target: Path, head: Path, answers: list[list[int]]) -> float:
    """Returns the share of the tokens drafted by ``head`` that are accepted. The answers are those without it."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "disable_by_batch_size": 64}
    with LLM(target, max_num_seqs=8, speculative_config=config) as llm:
        assert [list(answer.outputs[0].token_ids) for answer in llm.generate(ASKED, GREEDY)] == answers
        figures = llm.engine.cumulative_stats().speculation
    assert figures.proposed > 20
    return figures.accepted / figures.proposed


@pytest.mark.full
def test_the_engine_accepts_what_a_trained_head_drafts_and_answers_as_without_it(run: Path, target: Path, answers: list[list[int]]) -> None:
    assert len({token for answer in answers for token in answer}) > 20
    assert drafted(target, run / "model", answers) > 0.5 > 0.1 > drafted(target, run / "models" / "draft", answers)
    asked = ("generate", str(target), "--prompt", ASKED[0], "--temperature", "0", "--max-tokens", "20")
    config = json.dumps({"method": "eagle3", "model": str(run / "model"), "num_speculative_tokens": 3})
    assert command(*asked, "--speculative-config", config) == command(*asked)


@pytest.mark.full
@pytest.mark.skipif(not is_installed(), reason="the vLLM sidecar has no environment here: tandem sidecar install vllm")
@pytest.mark.parametrize("head", ["part", "whole"])
def test_vllm_reads_the_folder_and_accepts_what_the_head_drafts(run: Path, target: Path, answers: list[list[int]], tmp_path: Path, head: str) -> None:
    folder = run / "model"
    if head == "whole":
        # The target's vocabulary, without a map.
        folder, shapes = tmp_path / "whole", read_shapes(target)
        whole = Eagle3Head(eagle3_shapes(shapes, shapes.vocab_size), ReferenceKernels())
        initialise_eagle3(whole, 0)
        save_eagle3(whole, folder)
    done = subprocess.run(
        [python_of("vllm"), Path(__file__).with_name("vllm_drafts.py"), target, folder, json.dumps(ASKED)], capture_output=True, text=True,
        timeout=300, env={**os.environ, **environment("cpu", 1), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tokens"] == answers
    assert said["proposed"] > 20 and (said["accepted"] > 0.5 * said["proposed"] if head == "part" else said["accepted"] < 0.1 * said["proposed"])


@pytest.mark.full
def test_a_head_is_refused_in_one_line_where_it_is_not_for_the_model_or_is_no_head(run: Path, target: Path, data: Path, tmp_path: Path) -> None:
    def drafts(head: Path | str) -> str:
        return refused("generate", str(target), "--prompt", "1", "--speculative-config", json.dumps({"method": "eagle3", "model": str(head)}))

    for key, value in (("hidden_size", 64), ("vocab_size", 300)):
        shutil.copytree(run / "model", tmp_path / key)
        config = json.loads((run / "model" / "config.json").read_text())
        (tmp_path / key / "config.json").write_text(json.dumps({**config, key: value}))
        assert f"has {key} {value} and the model {config[key]}" in drafts(tmp_path / key)
    assert "is not a folder here" in drafts(tmp_path / "nowhere")
    assert "architectures ['Qwen3ForCausalLM']; name the folder of an EAGLE-3 head" in drafts(data / "model")
    for asked in (("generate", str(run / "model"), "--prompt", "1"), ("convert", str(run / "model"), str(tmp_path / "made"), "--to", "megatron")):
        assert "is a draft head of EAGLE-3 and no model by itself; give it to its target" in refused(*asked)


@pytest.mark.full
def test_verify_reads_all_that_a_draft_run_began_with_and_a_resume_refuses_what_it_still_needs(run: Path, tmp_path: Path) -> None:
    assert "everything is as it was written" in command("verify", str(run))
    assert "head" in command("models", "list", "--registry", str(run.parent / "registry"))
    target = Path(yaml.safe_load((run / "config.yaml").read_text())["model"]["path"])
    forget_end(run)
    for damaged in (target / "model.safetensors", run / "models" / "draft" / "model.safetensors", next((run / "rollouts").glob("*.tar"))):
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        said = command("verify", str(run), status=1)
        assert damaged.name in said and "damaged" in said, said
        if damaged.parent.name != "rollouts":
            # A shard is verified when a step reads it.
            assert damaged.name in command("resume", str(run), status=1)
        damaged.write_bytes(content)
    assert "everything is as it was written" in command("verify", str(run))


EXACT = {"tensor": 2, "deterministic": True}
MESHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (EXACT, {"pipeline": 2}), ({"pipeline": 2}, {}), ({"pipeline": 2, **EXACT}, {"data": 2, "zero": 2}),
)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with few tokens in a micro-batch, so that several are under way in a pipeline."""
    folder = tmp_path_factory.mktemp("whole")
    command("train", str(write_recipe(folder, data, trainer={"micro_batch_tokens": 40})))
    return folder / "run"


@pytest.mark.full
@pytest.mark.parametrize(("first", "then"), MESHES, ids=str)
def test_a_run_on_tensor_ranks_and_pipeline_stages_has_the_bits_of_one_process_and_goes_on_elsewhere(
    first: dict[str, Any], then: dict[str, Any], data: Path, whole: Path, tmp_path: Path
) -> None:
    machine = {"threads": 8}
    assert rows(whole)[0]["draft/acceptance_length"] >= 1
    recipe = write_recipe(tmp_path, data, trainer={"micro_batch_tokens": 40}, parallel=first, machine=machine, run={"max_steps": 2})
    command("train", str(recipe))
    assert rows(tmp_path / "run") == rows(whole)[:2]
    reset = {"tensor": 1, "pipeline": 1} | ({"deterministic": None} if "deterministic" in first else {})
    command("resume", str(tmp_path / "run"), "--run.max_steps=4", *(f"--parallel.{key}={json.dumps(value)}" for key, value in (reset | then).items()))
    ours, theirs = rows(tmp_path / "run"), rows(whole)
    heads = [load_file(run / "model" / "model.safetensors") for run in (tmp_path / "run", whole)]
    assert heads[0].keys() == heads[1].keys() and {"d2t", "t2d"} <= heads[0].keys()
    evaluated = []
    for run in (tmp_path / "run", whole):
        with Journal(run / "journal.sqlite", read_only=True) as journal:
            evaluated.append([measured for _, kind, measured in journal.evaluations() if kind == "held_out_drafts"][-1])
    if "data" in then:
        # Data-parallel ranks add in another order.
        assert all(mine == pytest.approx(its, rel=1e-5) for mine, its in zip(ours, theirs, strict=True))
        assert all(torch.allclose(tensor.float(), heads[1][name].float(), atol=3e-4) for name, tensor in heads[0].items())
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)
    else:
        assert ours == theirs and evaluated[0] == evaluated[1]
        assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


def test_what_a_head_cannot_be_trained_with_is_refused(data: Path, tmp_path: Path) -> None:
    given = "and algorithm.name is 'draft', which"
    said = refused("train", str(write_recipe(tmp_path, data, parallel={"context": 2})), "--dry-run")
    assert said.endswith(f"'parallel.context' is 2 {given} trains a head on whole sequences; set it to 1")
    said = refused("train", str(write_recipe(tmp_path, data, parallel={"context": 1, "data": 2, "zero": 3})), "--dry-run")
    assert said.endswith(f"'parallel.zero' is 3 {given} reads whole weights of the model; set it to 0 or 1 or 2")
    with pytest.raises(UserError, match="is not the folder of a run; name one of reinforcement learning"):
        list(rollouts_of(tmp_path / "nowhere", 0))
    with pytest.raises(UserError, match=r"'data.rollouts' is .*, which is not read: algorithm.name is 'sft'; set algorithm.name to draft"):
        load_config(write_recipe(tmp_path, data, algorithm={"name": "sft", "draft_steps": 5, "draft_vocab_size": 0}, data={"rollouts": ["runs/grpo"]}))
    with pytest.raises(UserError, match=r"'algorithm.draft_vocab_size' is 9999 and the model has \d+ tokens; give at most as many, or 0"):
        dry_run(load_config(recipe := write_recipe(tmp_path, data, algorithm={"draft_vocab_size": 9999})), recipe)
