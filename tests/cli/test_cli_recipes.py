"""The recipes of the repository run, each with a tiny model and for a step or two."""

import datetime
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers_cli import ROOT, TINY_MODEL, TINY_RUN, TINY_WARM_UP, real

from tandem import LLM, SamplingParams
from tandem.cli.main import parser
from tandem.config.recipe import load_config
from tandem.config.task import TaskConfig
from tandem.data.rows.source import file_rows
from tandem.data.tasks.base import TaskItem
from tandem.data.tasks.dataset import items_of
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows


def questions() -> list[TaskItem]:
    path = str(ROOT / "examples" / "questions.jsonl")
    return items_of(file_rows(path), TaskConfig("dataset", path=path))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_in_order(path: Path) -> None:
    load_config(path)


@pytest.fixture(scope="module")
def their_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder written by transformers: Llama, with a byte-level BPE tokenizer trained on the questions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    items = questions()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        (item.text for item in items), trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    folder = tmp_path_factory.mktemp("theirs") / "llama"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        )
    ).save_pretrained(folder)
    return folder


def test_a_folder_of_transformers_and_a_file_train_with_the_users_judges(their_model, tmp_path) -> None:
    done = real(
        "train", "recipes/dataset.yaml", f"--model.path={their_model}", f"--run.directory={tmp_path}", "--run.name=mine", *TINY_RUN,
        "--run.max_steps=2",
    )
    assert done.code == 0, done.err
    directory = tmp_path / "mine"
    rows = read_rows(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["mismatch_kl"] == 0.0 for row in rows)
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        samples, scores = journal.samples(1), journal.scores(1)
    assert samples is not None and scores is not None
    assert {frozenset(score.components) for score in scores} == {frozenset({"exact_symbol", "partial_credit", "partial_credit/length"})}
    items = questions()
    for sample, score in zip(samples, scores, strict=True):
        words = sample.text.split()
        given = words[0].rstrip(".,;") if words else ""
        rights = {str(item.ground_truth) for item in items}
        possible = {1.2 * (given == right) + 0.1 * (given[:1].lower() == right[:1].lower() and given != right) for right in rights}
        assert any(score.value == pytest.approx(value) for value in possible)


CHAIN_SUM = "--task.name=reasoning_gym:chain_sum", "--task.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"


@pytest.mark.full
def test_a_reasoning_gym_task_trains_a_model_that_the_recipe_makes(command, tmp_path) -> None:
    pytest.importorskip("reasoning_gym")
    given = ("recipes/reasoning_gym.yaml", "--inline", f"--run.directory={tmp_path}", "--run.name=mine", *CHAIN_SUM)
    done = real("train", *given, *TINY_MODEL, *TINY_WARM_UP, *TINY_RUN)
    assert done.code == 0, done.err
    (row,) = read_rows(tmp_path / "mine" / "metrics.jsonl")
    assert row["mismatch_kl"] == 0.0
    recipe = tmp_path / "mine" / "config.yaml"
    found = json.loads(command("evaluate", tmp_path / "mine" / "model", "--recipe", recipe, "--prompts", "4", "--json").out)
    assert len(found["examples"]) == 4
    for example in found["examples"]:
        asked = re.search(r"(\d) ([+-]) (\d) =", example["prompt"])
        assert asked is not None
        first, sign, second = asked.groups()
        assert int(example["ground_truth"]) == int(first) + (1 if sign == "+" else -1) * int(second)


OTHER_TASK = "--task.name=reasoning_gym:basic_arithmetic", "--task.settings={}", "--model.create.max_position_embeddings=512"


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(CHAIN_SUM, marks=pytest.mark.full), pytest.param(OTHER_TASK, marks=pytest.mark.full)], ids=["as it stands", "sums", "other"]
)
@pytest.mark.usefixtures("unmeasured_speed")
def test_the_recipe_as_it_stands_and_other_tasks_by_name_alone_are_in_order(command, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("reasoning_gym")
    assert command("train", "recipes/reasoning_gym.yaml", "--dry-run", *arguments).code == 0


@pytest.mark.full
def test_the_reasoning_gym_recipe_gains_in_sampled_accuracy_on_fresh_prompts(tmp_path) -> None:
    pytest.importorskip("reasoning_gym")
    done = real(
        "train", "recipes/reasoning_gym.yaml", "--inline", "--machine.threads=1", f"--run.directory={tmp_path}", "--run.name=mine",
        "--run.max_steps=25", limit_s=1800,
    )
    assert done.code == 0, done.err
    with Journal(tmp_path / "mine" / "journal.sqlite", read_only=True) as journal:
        figures = {(step, kind): result["accuracy"] for step, kind, result in journal.evaluations()}
    assert figures[25, "final"] > figures[0, "sampled"] + 0.15


def test_the_examples_judges_give_what_their_words_say() -> None:
    import runpy

    judges = runpy.run_path(str(ROOT / "examples" / "rewards.py"))
    exact, score = judges["exact_symbol"], judges["compute_score"]
    completions, answers = [" Fe.", "fe", "", "Au is it"], ["Fe", "Fe", "Fe", "Au"]
    assert exact(completions=completions, answer=answers, atomic_number=[26, 26, 26, 79]) == [1, 0, 0, 1]
    assert [score("dataset", text, "Fe")["score"] for text in ("Fe", "fe", "F", "Au", "")] == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_the_examples_questions_are_the_first_92_elements_each_once() -> None:
    items = questions()
    assert [item.columns["atomic_number"] for item in items] == list(range(1, 93))
    assert len({item.text for item in items}) == len({item.ground_truth for item in items}) == 92


def commands_of(recipe: str) -> list[list[str]]:
    """Returns the commands in the header of a recipe, each as words without ``tandem``."""
    head = (ROOT / "recipes" / recipe).read_text(encoding="utf-8").split("\n\n")[0]
    text = re.sub(r"\\\n# +", "", head)
    return [shlex.split(line.removeprefix("#   tandem")) for line in text.splitlines() if line.startswith("#   tandem ")]


def test_commands_in_the_head_of_the_fine_tuning_recipe_are_in_order() -> None:
    commands = commands_of("sft.yaml")
    assert [words[0] for words in commands] == ["tokenize", "tokenize", "train", "generate", "tokenize", "train"]
    for words in commands:
        options, overrides = parser().parse_known_args(words)
        if options.command == "train":
            load_config(ROOT / options.recipe, overrides)
        else:
            assert not overrides


@pytest.mark.full
def test_fine_tuning_recipe_teaches_dates_that_it_was_not_shown_and_its_held_out_loss_falls(tmp_path: Path) -> None:
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for words in commands_of("sft.yaml")[:3]:
        done = real(*words, *["--machine.threads=1"] * (words[0] == "train"), cwd=tmp_path)
        assert done.code == 0, done.err
    assert "160 steps: held-out loss" in done.out
    with Journal(tmp_path / "runs" / "sft" / "journal.sqlite", read_only=True) as journal:
        losses = [result["loss"] for _, kind, result in journal.evaluations() if kind == "held_out"]
    assert len(losses) == 9 and losses == sorted(losses, reverse=True) and losses[-1] < 0.05
    shown = (tmp_path / "examples" / "dates" / "dates.jsonl").read_text()
    days = [day for day in (datetime.date(1951, 2, 3) + datetime.timedelta(days=311 * n) for n in range(100)) if f"{day}" not in shown][:40]
    llm = LLM(str(tmp_path / "runs" / "sft" / "model"))
    answers = llm.generate([f"Write {day} in words." for day in days], SamplingParams(temperature=0, max_tokens=16))
    right = sum(answer.outputs[0].text == f"{day.day} {day:%B} {day.year}" for answer, day in zip(answers, days, strict=True))
    assert right >= 36


def test_example_dates_are_right_and_each_once() -> None:
    rows = [json.loads(line) for line in (ROOT / "examples" / "dates" / "dates.jsonl").read_text().splitlines()]
    for row in rows:
        day = datetime.date.fromisoformat(row["prompt"].removeprefix("Write ").removesuffix(" in words."))
        assert row["completion"] == f"{day.day} {day:%B} {day.year}"
    assert len({row["prompt"] for row in rows}) == len(rows) == 1000
