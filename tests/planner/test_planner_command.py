"""The command ``tandem plan`` in a process of its own: figures, inputs and refusals, without torch."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recipes_of_models import grpo_recipe

from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.estimate.prompt_beginnings import Prompts

SIZES = shlex.split("--hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256")
PUBLISHED = shlex.split(
    "--gpu H100-80GB --gpus 768 --hidden 8192 --layers 84 --heads 64 --kv-heads 64 --ffn 32768 --gated-mlp false --vocab 131072 --seq 4096 "
    "--global-batch 384 --tp 8 --pp 2 --virtual-pp 2 --dp 48 --ep 1 --cp 1 --zero 1 --precision bf16 --recompute selective"
)
RUN = "import sys; from tandem.cli.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, "plan", *arguments], capture_output=True, text=True, timeout=120)


def test_a_layout_is_scored_without_torch() -> None:
    done = plan("--json", *PUBLISHED)
    assert (done.returncode, done.stderr) == (0, "False\n")
    answer = json.loads(done.stdout)
    memory = answer["memory_bytes_per_gpu"]
    assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total")
    assert answer["bubble_fraction"] == 1 / 16
    assert answer["warnings"] == []
    assert sum(answer["seconds_by_kind"].values()) == pytest.approx(answer["step_seconds"])
    tokens = 384 * 4096
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(tokens / answer["step_seconds"] / 768)
    # Equation 3 of Korthikanti et al. (2022): 72 B s L h^2 (1 + s / 6 h + V / 12 h L).
    published = 72 * tokens * 84 * 8192**2 * (1 + 4096 / 6 / 8192 + 131072 / 12 / 8192 / 84)
    assert answer["model_tflops_per_gpu"] == pytest.approx(published / answer["step_seconds"] / 768 / 1e12, rel=1e-3)
    assert answer["mfu_percent"] == pytest.approx(100 * answer["model_tflops_per_gpu"] / 989.5, rel=1e-3)
    # Megatron-Core measured 419.7 TFLOP/s (`planner-measured.csv`).
    assert answer["model_tflops_per_gpu"] == pytest.approx(419.7, rel=0.15)


def test_without_a_layout_one_is_recommended_and_its_json_scores_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    asked = ["plan", "--json", "--gpus", "16", *SIZES, "--seq", "4096", "--global-batch", "64"]
    assert main(asked) == 0
    answer = json.loads(capsys.readouterr().out)
    layout = answer["layout"]
    axes = [word for name in ("tp", "pp", "virtual_pp", "dp", "cp", "ep", "zero", "micro_batch") for word in (f"--{name.replace('_', '-')}", str(layout[name]))]
    assert main([*asked, *axes, "--recompute", layout["recompute"], "--sequence-parallel", str(layout["sequence_parallel"]).lower()]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(answer["step_seconds"])
    assert {each["name"] for each in answer["axes"]} == {"data", "tensor", "pipeline"}
    assert answer["considered"] > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--gpus", "0"], "--gpus is 0; it must be from 1 to 1,000,000"),
        (["--gpu", "H10-80GB"], "GPU 'H10-80GB' is unknown; did you mean 'H100-80GB'?"),
        (["--gpus", "8", "--tp", "8", "--dp", "2"], "--tp 8 x --pp 1 x --cp 1 x --dp 2 are 16 GPUs, and --gpus is 8; change one of them (--dp 1 fits)"),
        (["--gpus", "6", "--tp", "3"], "--tp is 3, which does not divide the model's num_attention_heads 32; 2 does"),
        (["--gpus", "8", "--global-batch", "999999999999"], "the largest that are published have about 16 million"),
        (["--heads", "33"], "--heads is 33, which does not divide --hidden 4096"),
        (["--kv-heads", "5"], "--kv-heads is 5, which does not divide --heads 32"),
        (["--layers", "0"], "--layers is 0; it must be from 1 to 10,000,000"),
        (["--gpus", "64", "--pp", "64", "--dp", "1"], "--pp is 64; the model has 32 layers, and a stage needs one"),
        (["nowhere"], "--hidden and the model 'nowhere' both give sizes; leave one out"),
        (["--micro-batch", "0"], "--micro-batch is 0; it must be from 1 to --global-batch 1024"),
        (["--gpus", "8", "--micro-batch", "1000"], "divides over no data-parallel ranks of 8 GPUs in micro-batches of 1000; make it a multiple of 8000"),
        (["--gpus", "2", "--ep", "2"], "--ep is 2; the model has no experts: leave it at 1"),
        (["--html", "/dev/null/plan.html"], "--html is '/dev/null/plan.html', which cannot be written: Not a directory; name a file"),
        (["--emit", "recipe", "--recipe", "/dev/null/plan.yaml"], "--recipe is '/dev/null/plan.yaml', which cannot be written: Not a directory; name a file"),
        (["--checklist"], "--checklist is of a recipe; name one, for example 'tandem plan sort --checklist'"),
    ),
    ids=("no-gpus", "unknown-gpu", "product", "heads", "batch", "hidden", "kv-heads", "no-layers", "stages", "two-models",
         "no-micro-batch", "large-micro-batch", "no-experts", "html", "recipe-file", "checklist"),
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    assert main(["plan", *SIZES, "--global-batch", "1024", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_flags_say_how_experts_are_reached_and_what_states_and_sums_have(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    mixture = ("--json", *SIZES, "--experts", "64", "--experts-per-token", "8", "--expert-ffn", "512", "--gpus", "16", "--dp", "16", "--ep", "16")

    def scored(*flags: str) -> Any:
        assert main(["plan", *mixture, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    plain, once, halved = scored(), scored("--expert-dispatch", "once"), scored("--state-precision", "bf16", "--reduce-precision", "bf16")
    exchanged, total = (lambda answer: answer["seconds_by_kind"]["expert_communication"]), (lambda answer: answer["memory_bytes_per_gpu"]["total"])
    # Of 8 copies of a token, half cross to the other node of two; once, one does in 255 of 256 cases.
    assert exchanged(once) / exchanged(plain) == pytest.approx(1 / 4, rel=0.02)
    assert total(halved) < total(plain)


def test_a_config_is_read_and_what_is_not_understood_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main
    from tandem.planner.model_sizes import model_sizes

    gemma = {
        "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 9216, "vocab_size": 256000, "sliding_window": 4096, "sliding_window_pattern": 2,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    assert model_sizes(gemma, "config.json").layer_windows == (4096, None, 4096, None)
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024, "tie_word_embeddings": True}
    gpt = model_sizes(gpt2, "config.json")
    assert (gpt.intermediate_size, gpt.gated_mlp, gpt.num_key_value_heads) == (3072, False, 12)
    (tmp_path / "config.json").write_text(json.dumps({**gemma, "memory_slots": 64}))
    assert main(["plan", str(tmp_path), "--gpus", "8"]) != 0
    assert "fields that the planner does not understand: memory_slots" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--gpus", "8", "--ignore-fields", "memory_slots", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 8


@pytest.mark.parametrize("family", ("llama", "gpt_neox"))
def test_heads_of_a_config_that_do_not_divide_its_hidden_size_are_refused(family: str, tmp_path: Path) -> None:
    from tandem.planner.model_sizes import model_sizes
    from tandem.types.errors import UserError

    config = {
        "model_type": family, "hidden_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 10, "intermediate_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"'config.json' has hidden_size 50; it must be a multiple of num_attention_heads \(3\) where head_dim is not given"):
        model_sizes(config, "config.json")
    assert model_sizes({**config, "head_dim": 16}, "config.json").head_dim == 16


def test_a_recipe_is_scored_with_its_own_longest_sequence_and_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    for recipe, sequence in (("sort", 128), (str(grpo_recipe(tmp_path)), 4096)):
        assert main(["plan", recipe, "--gpus", "8", "--dp", "8", "--zero", "3", "--recompute", "full", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["layout"]["seq"], answer["warnings"]) == (sequence, [])
    assert main(["plan", "sort", "--gpus", "2", "--dp", "2", "--seq", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == ["sequences of 4096 tokens are longer than the model's context of 128"]


def test_a_recipe_is_scored_with_tandems_own_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    memory = []
    for model in (str(grpo_recipe(tmp_path)), str(tmp_path / "model")):
        assert main(["plan", model, "--gpus", "8", "--dp", "8", "--seq", "4096", "--global-batch", "512", "--json"]) == 0
        memory.append(json.loads(capsys.readouterr().out)["memory_bytes_per_gpu"])
    own, literature = memory
    # Until ZeRO 3 divides them every rank has all fp32 weights; a head in chunks.
    assert own["master_weights"] == 8 * literature["master_weights"]
    assert own["logits"] < literature["logits"]


LLAMA_405B = shlex.split(
    "--gpus 16384 --hidden 16384 --layers 126 --heads 128 --kv-heads 8 --ffn 53248 --vocab 128256 --seq 8192 --global-batch 2048 --tp 8 --pp 16 --dp 128"
)


def test_a_whole_run_is_that_of_the_time_model_with_its_checkpoints_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    assert main(["plan", *LLAMA_405B, "--train-tokens", "15.6e12", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    run = answer["run"]
    assert run["steps"] == round(15.6e12 / (2048 * 8192)) and run["step_s"] == answer["step_seconds"]
    # 419 interruptions in 54 days on as many GPUs (Llama 3, table 5); 14 bytes a parameter.
    assert run["between_failures_s"] == pytest.approx(54 * 86400 / 419)
    assert run["checkpoint_bytes"] == 14 * answer["parameters"]
    assert run["share"] < 1 and run["seconds"] == pytest.approx(run["steps"] * run["step_s"] / run["share"])
    assert main(["plan", *LLAMA_405B, "--train-tokens", "15.6e12"]) == 0
    said = capsys.readouterr().out
    assert f"run of {run['steps']:,} steps: {run['seconds'] / 86400:,.3g} days" in said and "assumed: failures as in" in said


@pytest.mark.parametrize("tokens", ("0", "nan", "many", "1e30", "5"))
def test_a_run_of_tokens_that_no_run_has_is_refused(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    assert main(["plan", *LLAMA_405B, "--train-tokens", tokens]) == 2
    allowed = "it must be a number of tokens, from the 16,777,216 of a step to 1e18, such as 15e12"
    assert capsys.readouterr().err.endswith(f"--train-tokens is '{tokens}'; {allowed}\n")


def test_a_recipe_gives_model_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    assert main(["plan", "sort", "--gpus", "2", "--json", "--dp", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["dp"] == 2


def test_a_page_is_one_file_without_another_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    assert main(["plan", *SIZES, "--gpus", "16", "--seq", "4096", "--global-batch", "64", "--html", str(tmp_path / "plan.html")]) == 0
    page = (tmp_path / "plan.html").read_text()
    assert "://" not in page
    assert "<script" not in page
    assert page.count("<svg") == 1 and page.count("class='bars'") == 2
    assert "Front of time and memory" in page
    assert main(["plan", *SIZES, "--gpus", "16", "--pp", "4", "--html", str(tmp_path / "one.html")]) == 0
    one = (tmp_path / "one.html").read_text()
    # A bar for every stage, and a forward and a backward pass of every micro-batch on each.
    assert [f"<span>stage {rank}</span>" in one for rank in range(5)] == [True] * 4 + [False]
    assert one.count("<title>forward of micro-batch") == one.count("<title>backward of micro-batch") == 4 * 16


def test_what_is_emitted_is_a_recipe_with_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    from tandem.cli.main import main
    from tandem.config.recipe import recipe_of

    layout = ["--gpus", "16", "--tp", "2", "--pp", "2", "--dp", "4", "--recompute", "full", "--global-batch", "64"]
    assert main(["plan", *SIZES, *layout, "--emit", "recipe"]) == 0
    recipe = recipe_of(yaml.safe_load(capsys.readouterr().out))
    recipe.check()
    assert (recipe.parallel.tensor, recipe.parallel.pipeline, recipe.parallel.data, recipe.parallel.zero) == (2, 2, 4, 1)
    assert (recipe.trainer.recompute, recipe.trainer.precision, recipe.parallel.world) == ("full", "bf16", 16)


def test_a_recipe_that_is_emitted_keeps_its_other_sections(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    from tandem.cli.main import main
    from tandem.config.load import read_yaml

    assert main(["plan", "sort", "--gpus", "2", "--dp", "2", "--emit", "recipe"]) == 0
    written = yaml.safe_load(capsys.readouterr().out)
    original = read_yaml("recipes/sort.yaml")
    assert {name: section for name, section in written.items() if name not in ("parallel", "trainer")} == {
        name: section for name, section in original.items() if name not in ("parallel", "trainer")
    }
    assert written["parallel"]["data"] == 2


def test_the_checklist_has_fourteen_items_and_follows_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tandem.cli.main import main

    assert main(["plan", "sort", "--checklist", "--json"]) == 1
    items = json.loads(capsys.readouterr().out)
    assert len(items) == 14
    assert [each["part"] for each in items].count("training") == 7
    missing = {each["name"] for each in items if not each["is_met"]}
    assert "products in 16 bits" in missing
    recipe = (Path("recipes/sort.yaml")).read_text().replace("trainer:\n", "trainer:\n  precision: bf16\n")
    (tmp_path / "better.yaml").write_text(recipe)
    assert main(["plan", str(tmp_path / "better.yaml"), "--checklist", "--json"]) == 1
    assert {each["name"] for each in json.loads(capsys.readouterr().out) if not each["is_met"]} == missing - {"products in 16 bits"}


def test_a_recipe_of_reinforcement_learning_has_its_step_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main

    words = ["plan", "sort_partial", "--gpus", "2", "--dp", "2", "--response-tokens", "20"]
    assert main([*words, "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["rl_step"]
    phases = sum(step[f"{name}_seconds"] for name in ("rollout", "weight_update", "switch", "inference", "training"))
    assert step["step_seconds"] == pytest.approx(phases) and step["rollout_seconds"] > 0 and step["training_seconds"] > 0
    assert step["longest_tokens"] == step["budget_tokens"] > 0
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "step of reinforcement learning: " in text and "assumed, since the recipe does not say: prompts of" in text
    assert main(["plan", "sort", "--gpus", "2", "--dp", "2", "--response-tokens", "9999"]) != 0
    assert "--response-tokens is 9999; it must be from 1 to 32, which the recipe allows" in capsys.readouterr().err
    assert main(["plan", *SIZES, "--gpus", "8", "--dp", "8", "--response-tokens", "9"]) != 0
    assert "is of a step of reinforcement learning; name its recipe" in capsys.readouterr().err


def test_an_engine_that_does_not_fit_leaves_the_layout_scored() -> None:
    from dataclasses import replace

    from tandem.config.recipe import Recipe, load_config
    from tandem.estimate.hardware.load import load_hardware
    from tandem.estimate.training.layout import TrainingLayout
    from tandem.layout.shapes import ModelShapes
    from tandem.planner.rl_plan import described_rl_step
    from tandem.planner.score import score

    recipe = load_config("sort")
    assert isinstance(recipe, Recipe)
    large = ModelShapes("llama", 128256, 16384, 126, 128, 8, 128, 53248, 8192, False)
    layout = TrainingLayout(replace(recipe.parallel, data=8), 4096, 8)
    text, answer = described_rl_step(recipe, score(large, layout, load_hardware("H100-80GB")), None, None, None)
    assert text == f"step of reinforcement learning: not predicted, {answer['refused']}" and "use more GPUs, fewer bits" in text


def test_drafts_are_predicted_with_a_declared_acceptance_and_otherwise_said_to_save_nothing() -> None:
    from dataclasses import replace

    from tandem.config.engine import SpeculativeConfig
    from tandem.config.recipe import Recipe, load_config
    from tandem.estimate.hardware.load import load_hardware
    from tandem.estimate.training.layout import TrainingLayout
    from tandem.layout.shapes import ModelShapes
    from tandem.planner.rl_plan import described_rl_step
    from tandem.planner.score import score

    recipe = load_config("sort")
    assert isinstance(recipe, Recipe)
    engine = replace(recipe.rollout.engine, speculative_config=SpeculativeConfig("ngram", num_speculative_tokens=3))
    drafted = replace(recipe, rollout=replace(recipe.rollout, engine=engine))
    shapes = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, False)
    scored = score(shapes, TrainingLayout(replace(recipe.parallel, data=8, zero=3), 4096, 8), load_hardware("H100-80GB"))
    (off, without), (silent, _), (text, answer) = (
        described_rl_step(each, scored, 20, 30, 32, rate) for each, rate in ((recipe, None), (drafted, None), (drafted, 0.5))
    )
    assert "drafts" not in off and "assumed, since the recipe does not say: drafts by 'ngram' that save nothing (--draft-acceptance)" in silent
    assert "drafts: up to 3 tokens for each of up to 256 sequences, 1.88 tokens a step if each is accepted with probability 0.5" in text
    assert answer["speculation"]["tokens_a_step"] == 1.875 and without["speculation"] is None
    assert answer["rollout_seconds"] < without["rollout_seconds"]
    with pytest.raises(UserError, match=r"--draft-acceptance is given and the recipe has no rollout\.engine\.speculative_config"):
        described_rl_step(recipe, scored, 20, 30, 32, 0.5)
    with pytest.raises(UserError, match="--draft-acceptance is 2; it must be from 0 to 1"):
        described_rl_step(drafted, scored, 20, 30, 32, 2.0)


def run_folder(folder: Path, recipe: Path, rows: list[dict[str, float]], prompts: "Prompts") -> Path:
    """Returns the folder of a run of ``recipe`` with these metrics and prompts, as its controller writes it."""
    from dataclasses import asdict

    from tandem.config.recipe import load_config
    from tandem.jobs.run_files import write_recipe
    from tandem.report.run_facts import PREDICTION_KEY
    from tandem.runtime.records.journal import Journal

    folder.mkdir()
    write_recipe(load_config(recipe), folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    with Journal(folder / "journal.sqlite") as journal:
        journal.set(PREDICTION_KEY, {"at": [], "prompts": asdict(prompts)})
    return folder


def test_a_run_that_measured_its_lengths_drafts_and_common_beginnings_gives_them_to_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tandem.cli.main import main
    from tandem.estimate.prompt_beginnings import Prompts

    engine = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    recipe = grpo_recipe(tmp_path, rollout={"prompts_per_step": 64, "max_tokens": 3072, "engine": engine}, trainer={"share_prompts": True})
    # Of three tokens that are each accepted with probability 1/2 after those before, 1/2 + 1/4 + 1/8 are. Eight samples of 101 + 400 tokens, of whose
    # completions a quarter is computed for another one: the prompt once, and three quarters of 8 x 400.
    drafted = {"perf/spec_accept_length": 1.875, "perf/spec_accept_rate": 0.875 / 3}
    once = {"perf/shared_prompt_share": 1 - (101 + 0.75 * 8 * 400) / (8 * (101 + 400))}
    rows = [{"response_length/mean": 9.0}] * 5 + [{"response_length/mean": 401.0, **drafted, **once}] * 10
    run = str(run_folder(tmp_path / "run", recipe, rows, Prompts.of_mean(101)))
    words = ["plan", str(recipe), "--gpus", "8", "--dp", "8", "--zero", "3", "--json"]
    answers = []
    by_flag = ["--prompt-tokens", "101", "--response-tokens", "401", "--draft-acceptance", "0.5"]
    for more in (["--measured", run], by_flag, ["--measured", run, "--prompt-tokens", "60"]):
        assert main([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["rl_step"])
    measured, flags, mixed = answers
    assert measured["speculation"]["acceptance"] == pytest.approx(0.5) and measured["measured"]["begun"] == pytest.approx(0.25)
    assert (measured["prompt_tokens"], mixed["prompt_tokens"]) == (pytest.approx(flags["prompt_tokens"]), pytest.approx(60, rel=0.01))
    # What is computed once is not known from the flags.
    assert measured["rollout_seconds"] == pytest.approx(flags["rollout_seconds"], rel=1e-3) and measured["training_seconds"] < flags["training_seconds"]
    assert main([*words[:-1], "--measured", run]) == 0
    assert f"measured by '{run}': prompts of 101 tokens on average, completions of 401 tokens on average, 25% of the completions' tokens begin as another " \
        "one of the group does, a draft token is accepted with probability 0.5" in capsys.readouterr().out  # fmt: skip
    for folder, said in ((tmp_path, "is no folder of a run"), (run_folder(tmp_path / "new", recipe, [], Prompts.of_mean(9)), "has measured no step")):
        assert main([*words, "--measured", str(folder)]) != 0
        assert f"--measured is '{folder}', which {said}" in capsys.readouterr().err
    # Of a run with a longer context than the recipe's, which the flags replace.
    for prompt, response, lengths, flag in ((100_000, 9.0, "prompts have 100,000", "prompt"), (9, 4000.0, "completions have 4,000", "response")):
        longer = str(run_folder(tmp_path / f"longer-{flag}", recipe, [{"response_length/mean": response}], Prompts.of_mean(prompt)))
        assert main([*words, "--measured", longer]) != 0
        said = capsys.readouterr().err
        assert f"--measured is '{longer}', whose {lengths} tokens on average; the recipe allows from 1 to " in said and f"give --{flag}-tokens" in said
        assert main([*words, "--measured", longer, f"--{flag}-tokens", "100"]) == 0
        capsys.readouterr()
    assert main([*words, "--prompt-tokens", "100000"]) != 0
    assert "--prompt-tokens is 100000; it must be from 1 to " in capsys.readouterr().err
    assert main([*words, "--prompt-tokens", "100", "--shared-prefix", "101"]) != 0
    assert "--shared-prefix is 101; it must be from 0 to 100, the mean tokens of a prompt" in capsys.readouterr().err
