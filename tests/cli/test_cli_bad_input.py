"""Invalid input of every kind: one line, before any work, with nothing overwritten."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_cli import real

from tandem.config.model import NewModelConfig
from tandem.jobs import start_rl
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.model.create_model import create_model
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import initialise_eagle3, save_eagle3
from tandem.model.huggingface.model_config import read_shapes
from tandem.types import RunError
from tandem.weight_transfer import shared_memory

NO_MODEL = "--sft=null", "--model.create=null"


def untouched(recipe: Path) -> bool:
    """Returns whether the recipe's run directory was never created."""
    return not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no command"),
        (("trian",), "did you mean 'train'?"),
        (("--version1",), "unknown argument '--version1'"),
        (("train",), "recipe"),
        (("train", "recipes/sort.yaml", "--fast"), "unknown argument '--fast'"),
        (("train", "recipes/sort.yaml", "--run.seed", "1"), "--run.seed=VALUE"),
        (("train", "recipes/sort.yaml", "trainer.learning_rate=1e-4"), "a key of the recipe is set with two dashes: --trainer.learning_rate=1e-4"),
        (("doctor", "--run.seed=1"), "unknown argument '--run.seed=1'"),
        (("generate",), "model"),
        (("generate", "nowhere", "--n", "many"), "--n"),
        (("resume", "nowhere"), "'nowhere' is not a run"),
        (("report", "nowhere"), "'nowhere' is not a run"),
        (("evaluate", "nowhere"), "--task or --recipe"),
        (("evaluate", "nowhere", "--task", "sort", "--prompts", "0"), "--prompts is 0"),
        (("evaluate", "nowhere", "--task", "sort"), "nowhere"),
        (("generate", "nowhere", "--prompt", "x"), "nowhere"),
        (("tokenize", "nowhere", "there", "--tokenizer", "x", "--shard-mib", "nan"), "--shard-mib is nan"),
        (("tokenize", "nowhere", "there", "--tokenizer", "x", "--shard-mib", "inf"), "--shard-mib is inf"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(command, arguments, says) -> None:
    assert says in command(*arguments).refusal()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--algorithm.group_sise=4", "did you mean 'algorithm.group_size'?"),
        ("--algoritm.group_size=4", "did you mean 'algorithm'?"),
        ("--model.create.hiden_size=4", "did you mean 'model.create.hidden_size'?"),
        ("--algorithm.group_size=four", "'algorithm.group_size' is"),
        ("--algorithm.group_size=1", "at least 2"),
        ("--algorithm.name=gprо", "must be one of"),
        ("--trainer.learning_rate=nan", "must be a number"),
        ("--trainer.learning_rate=-1", "above 0"),
        ("--task.name=srt", "did you mean 'sort'?"),
        ("--task.name=größer", "größer"),
        ("--rollout.max_tokens=256", "leaves no room"),
        ("--rollout.top_p=0.9", "tis_cap"),
        ("--rollout.engine.quantization=int8", "old_logprobs to recompute"),
        ("--rollout.engine.quantization=int3", "must be one of"),
        ("--rollout.engine.max_num_seqs=1", "a group is sampled at once"),
        ("--sft=null", "add a section 'sft'"),
        ("--model.path=x", "both are given"),
        ("--model.create=null", "neither is given"),
        ("--model.create.num_attention_heads=0", "num_attention_heads"),
        ("--model.create.num_key_value_heads=0", "num_key_value_heads"),
        ("--model.create.num_hidden_layers=1000000000", "at most 1000"),
        ("--model.create.characters=abc", "not in the tokenizer's vocabulary"),
        ("--model.create.characters=aa", "twice"),
        ("--task.prompt_template=Größe {prompt}", "not in the tokenizer's vocabulary"),
        ("--task.prompt_template=none", "must contain {prompt}"),
        ("--task.chat=true", "chat template"),
        ("--run.name=../up", "run.name"),
        ("--run.seed=-1", "run.seed"),
        ("--run.max_steps=1.5", "a whole number"),
        ("--run=3", "must be a section"),
        ("--rewards.functions=[{function: nowhere.py:judge}]", "nowhere.py"),
        ("--rewards.functions=[{function: math:no_such}]", "no_such"),
        ("--rewards.functions=[{function: answer_macher}]", "answer_macher"),
        ("--task.name=reasoning_gym:chain_some", "did you mean"),
        ("--task.min_digits=99", "from 2 to 64"),
        ("--machine.kernels=gpu", "must be one of"),
        ("--machine.threads=-1", "machine.threads"),
        ("--machine.threads=100000", "at most 1024"),
        ("--machine.memory_gib=.inf", "'machine.memory_gib' is inf; it must be a number, and finite"),
        ("--parallel.data=10000000000", "'parallel.data' is 10000000000, in a mesh of 10000000000 ranks"),
        ("--parallel.data=4096", "a step of section 'sft' has 2 demonstrations"),
        ("--run.max_steps=100000000000000000000", "below 2^63"),
        ("--model.create.rope_theta=-1", "'model.create.rope_theta' is -1; it must be above 0"),
        ("--rollout.engine.tensor_parallel_size=3", "'rollout.engine.tensor_parallel_size' is 3: the model's num_attention_heads 2"),
        ("--rollout.engine.speculative_config={method: draft, model: /nowhere}", "'/nowhere' is not a folder here"),
        ("--trainer.dtype=float64", "tis_cap"),
        ("--trainer.dtype=float16", "bfloat16"),
        ("--rollout.engine.device=cuda", "machine.device"),
        (
            "--algorithm.name=gpro",
            "must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, online_dpo, distillation, pretrain, sft, dpo",
        ),
        # Numbers that are numbers, and more than a clock or a count of bytes can hold.
        ("--rewards.start_deadline_s=1e308", "at most 2000000"),
        ("--parallel.collective_timeout_s=1000000000000", "at most 2000000"),
        ("--machine.call_deadline_s=1e12", "at most 2000000"),
        ("--rollout.engine.rank_timeout_s=1e12", "at most 2000000"),
        ("--rollout.engine.swap_space=1e308", "at most 1073741824"),
        ("--model.create.rope_theta=.inf", "must be a number, and finite"),
        ("--parallel.zero=true", "must be one of 0, 1, 2, 3"),
        ('--checkpoint.upload="a\\0b"', "null character"),
    ],
)
def test_a_wrong_key_value_or_combination_is_refused_before_any_work(command, recipe, override, says) -> None:
    assert says in command("train", recipe, override).refusal()
    assert untouched(recipe)


@pytest.mark.parametrize(
    "override",
    [
        "--model.create.hidden_size=1000000000", "--model.create.max_position_embeddings=1000000000",
        "--rollout.engine.kv_cache_tokens=100000000000000",
        "--model.create.intermediate_size=10000000000000", "--machine.memory_gib=0.001",
    ],
)
def test_what_cannot_fit_into_memory_is_refused_by_the_plan_before_any_work(command, recipe, override) -> None:
    assert "GiB at its worst moment" in command("train", recipe, override).refusal(1)
    assert untouched(recipe)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--rollout.prompts_per_step=1000000000", "lower rollout.prompts_per_step"),
        ("--evaluation.prompts=1000000000", "'evaluation.prompts' is 1000000000: with completions of up to rollout.max_tokens (8) tokens"),
        ("--evaluation.final_prompts=1000000000", "'evaluation.final_prompts' is 1000000000"),
        ("--sft.batch_size=1000000000", "'sft.batch_size' is 1000000000: its batches need"),
        ("--rewards.workers=1000000", "'rewards.workers' is 1000000: as many processes need at least"),
    ],
)
def test_counts_that_this_machine_cannot_hold_are_refused_before_any_work(command, recipe, override, says) -> None:
    for options in ((), ("--dry-run",)):
        message = command("train", recipe, override, *options).refusal(1)
        assert says in message and "lower" in message
    assert untouched(recipe)


@pytest.mark.usefixtures("unmeasured_speed")
def test_prompts_of_a_file_are_counted_as_many_as_it_has(command, recipe) -> None:
    assert command("train", recipe, *jsonl(recipe, GOOD), "--evaluation.prompts=1000000000", "--dry-run").code == 0


def test_reward_workers_beyond_the_files_that_the_process_may_open_are_refused(command, recipe, monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (100, 100))
    says = "'rewards.workers' is 20, and this process may open 100 files, 2 for each worker; lower it to 18 or raise 'ulimit -n'"
    assert command("train", recipe, "--rewards.workers=20", "--dry-run").refusal(1) == says


@pytest.mark.usefixtures("unmeasured_speed")
def test_a_kv_cache_too_small_for_one_sequence_is_refused_before_any_work(command, recipe) -> None:
    message = command("train", recipe, "--rollout.engine.kv_cache_tokens=240").refusal()
    assert "too few for one sequence of 256 tokens, the context; raise it to 256 or more" in message
    assert untouched(recipe)
    assert command("train", recipe, "--rollout.engine.kv_cache_tokens=256", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("", "a recipe is a mapping"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("model:\n  path: [\n", "not valid YAML"),
        ("model: {path: x}\nmodel: {path: y}\n", ":2: key 'model' is given twice"),
        ("task: {name: sort}\n", "'model' is missing"),
        ("model: 3\ntask: {name: sort}\n", "must be a section"),
        ("größe: 1\n", "unknown key 'größe'"),
        ("model: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_recipe_that_is_none_is_refused_with_its_name(command, tmp_path, content, says) -> None:
    path = tmp_path / "rezept-größe.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert says in command("train", path).refusal()


def test_a_recipe_that_is_a_folder_or_not_text_is_refused(command, tmp_path) -> None:
    assert "cannot be read" in command("train", tmp_path).refusal()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in command("train", tmp_path / "binary.yaml").refusal()


def jsonl(recipe: Path, lines: str | bytes) -> tuple[str, str]:
    path = recipe.parent / "questions.jsonl"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    return "--task={name: dataset, path: " + json.dumps(str(path)) + "}", "--sft.corrupted_share=0"


GOOD = "".join(json.dumps({"prompt": f"q{i}?", "answer": str(i)}) + "\n" for i in range(30))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "questions.jsonl' is empty"),
        (GOOD + "\n" + GOOD, "questions.jsonl:31: the line is empty"),
        (GOOD + '{"prompt": "x", "answer"\n', "questions.jsonl:31: not valid JSON"),
        (GOOD + '{"prompt": "x"}\n', "questions.jsonl:31: key 'answer' is missing"),
        (GOOD + "[1]\n", "questions.jsonl:31: a line is a JSON object"),
        (GOOD + '{"prompt": "", "answer": "1"}\n', "questions.jsonl:31: 'prompt' is an empty text"),
        (GOOD.encode() + b'{"prompt": "\xff", "answer": "1"}\n', "questions.jsonl:31: not UTF-8"),
        (GOOD + json.dumps({"prompt": "x" * 300, "answer": "1"}) + "\n", "questions.jsonl:31: the prompt has 300 tokens"),
        (GOOD + json.dumps({"prompt": "a", "answer": "1" * 300}) + "\n", "questions.jsonl:31: prompt and answer have 302 tokens"),
        (GOOD + '{"prompt": "größer?", "answer": "1"}\n', "'ö' (U+00F6"),
        ('{"prompt": "x", "answer": "1"}\n', "too few to hold some out"),
        (GOOD + '{"prompt": "x", "answer": {"a": 1}}\n', "questions.jsonl:31: the answer is"),
        (GOOD.replace("answer", "anser"), "there is no answer for reward function 'correct' (besides the prompt the row has 'anser'); set task.answer_key"),
        (GOOD.replace("prompt", "frage"), "questions.jsonl:1: key 'prompt' is missing; the row has 'frage', 'answer': set task.prompt_key"),
        (GOOD + '{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}\n', "questions.jsonl:31: 'prompt' is a list; and the first row has a text"),
        (GOOD.replace('"q', '[{"role": "user", "content": "q').replace('?"', '?"}]'), "has no chat template"),
    ],
)
def test_a_broken_line_of_a_file_is_named_by_file_and_line(command, recipe, lines, says) -> None:
    assert says in command("train", recipe, *jsonl(recipe, lines)).refusal()
    assert untouched(recipe)


def test_wrong_answers_that_a_task_cannot_make_are_refused_before_the_run(command, recipe) -> None:
    task, _ = jsonl(recipe, GOOD)
    assert "set it to 0" in command("train", recipe, task, "--sft.corrupted_share=0.5").refusal()
    assert untouched(recipe)


def test_a_folder_that_is_no_model_is_refused(command, recipe, model, tmp_path) -> None:
    broken = tmp_path / "no model"
    given = ("train", recipe, *NO_MODEL, f"--model.path={broken}")
    assert "which is not a folder" in command(*given).refusal()
    broken.mkdir()
    assert "config.json" in command(*given).refusal()
    shutil.copytree(model, broken, dirs_exist_ok=True)
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in command(*given).refusal()
    shutil.copy(model / "model.safetensors", broken)
    (broken / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in command(*given).refusal()
    (broken / "tokenizer.json").unlink()
    assert "no tokenizer.json" in command(*given).refusal()
    (broken / "config.json").write_text("[")
    assert "config.json" in command(*given).refusal()
    assert untouched(recipe)


@pytest.mark.full
def test_a_draft_head_of_another_model_is_refused_by_a_dry_run_and_before_weights_are_read(command, recipe, model, tmp_path) -> None:
    shapes = eagle3_shapes(target := read_shapes(model), target.vocab_size)
    head = Eagle3Head(replace(shapes, layer=replace(shapes.layer, hidden_size=8)), ReferenceKernels())
    initialise_eagle3(head, 0)
    save_eagle3(head, tmp_path / "other")
    asked = ("train", recipe, *NO_MODEL, f"--model.path={model}", "--dry-run")
    option = f"--rollout.engine.speculative_config={{method: eagle3, model: {tmp_path / 'other'}}}"
    says = f"draft head '{tmp_path / 'other'}' has hidden_size 8 and the model {target.hidden_size}; name a head that was trained for this model"
    assert command(*asked, option).refusal() == says
    assert "no layer of multi-token" in command(*asked, "--rollout.engine.speculative_config={method: mtp}").refusal()
    # A folder without weights.
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    config = json.dumps({"method": "eagle3", "model": str(tmp_path / "other")})
    assert command("generate", tmp_path / "bare", "--prompt", "1", "--speculative-config", config).refusal() == says
    assert "no layer of multi-token" in command("generate", tmp_path / "bare", "--prompt", "1", "--speculative-config", '{"method": "mtp"}').refusal()


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_by_every_command(command, recipe, model, tmp_path) -> None:
    folder = tmp_path / "mixed"
    create_model(NewModelConfig(hidden_size=16, num_hidden_layers=1, head_dim=4, characters="0123456789="), 0, folder)
    shutil.copy(model / "tokenizer.json", folder)
    says = "they do not belong together"
    assert says in command("train", recipe, *NO_MODEL, f"--model.path={folder}").refusal()
    assert says in command("generate", folder, "--prompt", "1").refusal()
    assert says in command("evaluate", folder, "--task", "sort").refusal()
    assert untouched(recipe)


def test_a_model_of_an_unknown_architecture_is_refused_by_name(command, model, tmp_path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    assert "mamba" in command("generate", folder, "--prompt", "1").refusal().lower()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", "1" * 97), "97"),
        (("--prompt", ""), "prompt"),
        (("--prompt", "größe"), "U+00F6"),
        (("--prompt", "1", "--temperature", "-1"), "temperature"),
        (("--prompt", "1", "--max-tokens", "0"), "max_tokens"),
        (("--prompt", "1", "--n", "0"), "n"),
        (("--prompt", "1", "--top-p", "2"), "top_p"),
        (("--prompt", "1", "--chat"), "chat template"),
        (("--prompt", "1", "--stop", ""), "stop"),
        (("--prompt", "1", "--lora", "nowhere"), "'nowhere' is not a folder here"),
        (("--prompt", "1", "--tensor-parallel-size", "3"), "is not divisible by 3"),
    ],
)
def test_generate_refuses_what_the_model_cannot_do(command, model, arguments, says) -> None:
    assert says in command("generate", model, *arguments).refusal()


def test_a_run_name_that_exists_is_refused_and_nothing_in_it_changes(command, recipe, tmp_path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("precious")
    assert "use 'tandem resume" in command("train", recipe, "--run.name=mine").refusal()
    assert (tmp_path / "runs" / "mine" / "config.yaml").read_text() == "precious"
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["config.yaml"]


def test_a_run_directory_that_is_a_file_or_below_one_is_refused(command, recipe, tmp_path) -> None:
    (tmp_path / "file").write_text("precious")
    for directory in ("file", "file/below"):
        assert "a folder cannot be made" in command("train", recipe, f"--run.directory={tmp_path / directory}").refusal()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_run_directory_in_which_nothing_can_be_written_is_refused(command, recipe) -> None:
    assert "a folder cannot be made" in command("train", recipe, "--run.directory=/proc/runs").refusal()


def test_an_offload_folder_that_cannot_hold_files_is_refused(command, recipe, tmp_path) -> None:
    (tmp_path / "file").write_text("precious")
    for folder in ("file", "file/below"):
        done = command("train", recipe, "--residents.plan=offload", f"--trainer.offload_folder={tmp_path / folder}")
        assert "is not a folder" in done.refusal()
    assert untouched(recipe)


def test_shared_memory_that_cannot_hold_the_weights_is_refused_before_any_work(command, recipe, monkeypatch) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda folder: 1000)
    assert "of shared memory for its weights and /dev/shm has 0.0 MiB free" in command("train", recipe).refusal(1)
    assert untouched(recipe)


@pytest.mark.parametrize(("override", "says"), [((), "of shared memory for its weights"), (("--machine.memory_gib=0.001",), "GiB at its worst moment")])
def test_a_machine_too_small_for_the_pod_is_found_before_an_interrupted_stage_of_fine_tuning_goes_on(
    command, recipe, monkeypatch, override: tuple[str, ...], says: str
) -> None:
    directory = recipe.parent / "runs" / "mine"

    def interrupted(*_: object) -> Path:
        raise RunError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(start_rl, "_start_model", interrupted)
        assert command("train", recipe, "--run.name=mine", "--inline").refusal(1) == "interrupted"
    monkeypatch.setattr(shared_memory, "free_bytes", lambda folder: 1000)
    assert says in command("resume", directory, "--inline", *override).refusal(1)
    assert not (directory / "sft").exists()


def test_the_real_command_refuses_as_the_function_does(recipe) -> None:
    assert "did you mean 'run.seed'?" in real("train", recipe, "--run.sed=1").refusal()
    assert "no command" in real().refusal()
    assert "GiB at its worst moment" in real("train", recipe, "--model.create.hidden_size=1000000000").refusal(1)
    assert untouched(recipe)


def test_no_prompt_at_all_is_refused(model) -> None:
    assert "standard input contains no prompt" in real("generate", model, stdin="\n\n").refusal()
