"""Absurd values of every recipe key and command-line option: one line, at once, and nothing is started."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from absurd import FILE_OF_CASE, Outcome, gateway_cases, recipe_cases, run_forked
from helpers_cli import ROOT, real

from tandem.config.gateway import GatewayConfig
from tandem.config.load import apply_overrides, build, read_yaml
from tandem.config.recipe import Recipe
from tandem.config.yaml_text import parse_yaml
from tandem.types import UserError

EXTREMES = ("-1", "1e18", "1e308", "nan", "9" * 5000, "9" * 400, '"a\\0b"', '"\\ud800"', "{1: 2}", "[[]]")


WHOLE = 2**63 - 1
LARGEST = {
    "run.seed": WHOLE, "sft.seed": WHOLE, "evaluation.examples": WHOLE, "evaluation.consecutive": WHOLE, "evaluation.every_steps": WHOLE,
    "checkpoint.every_minutes": 1e308, "checkpoint.every_steps": WHOLE, "rollout.top_k": WHOLE, "rollout.engine.max_num_batched_tokens": WHOLE,
    "run.max_restarts": WHOLE, "trainer.micro_batch_tokens": WHOLE, "trainer.warmup_steps": WHOLE, "trainer.max_skipped_steps": WHOLE,
    "algorithm.old_logprobs": "recompute", "algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.length_constant": 2**31 - 1,
    **dict.fromkeys(("algorithm.tis_cap", "algorithm.clip_ratio_high", "algorithm.advantage_epsilon", "algorithm.kl_coef"), 3.4e38),
    **dict.fromkeys(("trainer.max_grad_norm", "rewards.model_fault_value"), 3.4e38),
    **dict.fromkeys(("machine.call_deadline_s", "rewards.deadline_s", "rewards.sample_deadline_s", "rewards.start_deadline_s"), 2_000_000),
    **dict.fromkeys(("parallel.collective_timeout_s", "parallel.heartbeat_timeout_s", "rollout.engine.rank_timeout_s"), 2_000_000),
}  # fmt: skip
"""The largest values that are accepted."""


@pytest.mark.parametrize("key", [key for key, value in LARGEST.items() if value in (2**31 - 1, 3.4e38, 2_000_000)])
def test_a_value_above_the_largest_that_works_is_refused(command, recipe: Path, key: str) -> None:
    above = {2**31 - 1: 2**31, 3.4e38: 3.5e38, 2_000_000: 2_000_001}[LARGEST[key]]
    readable = ("algorithm.tis_cap", "algorithm.old_logprobs", "algorithm.loss_agg_mode", "rewards.deadline_s")
    needed = [f"--{name}={LARGEST[name]}" for name in readable if name != key]
    assert key.rpartition(".")[2] in command("train", recipe, *needed, f"--{key}={above}", "--dry-run").refusal()


@pytest.mark.full
def test_a_run_with_the_largest_values_of_every_key_ends_well(recipe: Path) -> None:
    done = real("train", recipe, *(f"--{key}={value}" for key, value in LARGEST.items()))
    assert done.code == 0, done.err


def test_every_key_at_its_extremes_is_built_or_refused_by_the_configuration(recipe: Path) -> None:
    """The checks of the machine, which need more time, are in the full proof below."""
    data, kinds = read_yaml(recipe), {"built": 0, "refused": 0}
    for case in recipe_cases(Recipe, recipe):
        if case.value in EXTREMES:
            overrides = [argument for argument in case.arguments if "=" in argument]
            try:
                build(Recipe, apply_overrides(data, overrides))
                kinds["built"] += 1
            except UserError:
                kinds["refused"] += 1
    assert kinds["refused"] > 700 and kinds["built"] > 10, kinds


def test_every_key_of_a_gateways_file_at_its_extremes_is_built_or_refused() -> None:
    kinds = {"built": 0, "refused": 0}
    for case in gateway_cases("http://127.0.0.1:9"):
        if case.value in EXTREMES:
            try:
                build(GatewayConfig, parse_yaml(case.content, FILE_OF_CASE))
                kinds["built"] += 1
            except (UserError, yaml.YAMLError):
                kinds["refused"] += 1
    assert kinds["refused"] > 500 and kinds["built"], kinds


@pytest.mark.parametrize(
    "override",
    [
        "--rewards.workers=1000000", "--rollout.prompts_per_step=1000000000", "--evaluation.prompts=1000000000", "--sft.batch_size=1000000000",
        "--machine.memory_gib=.inf", "--model.create.num_experts=2147483648", "--rollout.engine.max_num_seqs=1000000000000",
        "--rollout.engine.swap_space=1e8", "--run.seed=" + "9" * 5000, "--trainer.learning_rate=" + "9" * 400,
        "--run.name=\udcff", "--run.name=" + "[" * 50_000,
        "--rewards.functions=[{function: task, weight: 2026-11-22}]", "--run.directory=" + "x" * 100_000,
    ],
)  # fmt: skip
def test_an_absurd_value_is_refused_in_one_line_within_two_seconds(recipe: Path, override: str) -> None:
    moe = ["--model.create.architecture=qwen3_moe"] if "num_experts" in override else []
    outcome = run_forked(("train", str(recipe), "--dry-run", *moe, override))
    assert outcome.kind in ("refused", "failed"), outcome
    assert outcome.cpu_s < 2
    assert not (recipe.parent / "runs").exists()


def test_the_same_through_the_installed_command(recipe: Path) -> None:
    assert "'rewards.workers' is 1000000" in real("train", recipe, "--rewards.workers=1000000").refusal(1)


def test_an_argument_that_is_not_utf_8_is_refused_by_its_number(recipe: Path) -> None:
    assert "argument 2 is 'r\\udcff.yaml', whose byte 0xff is not UTF-8" in real("train", "r\udcff.yaml").refusal()


def test_a_line_that_repeats_a_huge_value_keeps_its_beginning_and_its_fix(command, recipe: Path) -> None:
    message = command("train", recipe, "--sft.schedule=" + "x" * 100_000).refusal()
    assert message.startswith("'sft.schedule' is 'xxx") and "must be one of constant, linear, cosine" in message and len(message) < 1600


def test_control_characters_of_a_value_do_not_reach_the_terminal(command, recipe: Path) -> None:
    message = command("train", recipe, '--run.name="\\e[31m\\r"').refusal()
    assert "\\x1b[31m\\r" in message and "\x1b" not in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--n", "9" * 400), "is not a whole number below 2^63"),
        (("--n", "1000000000"), "1,000,000,000 completions are asked for, which need at least"),
        (("--max-num-seqs", "1000000000000", "--max-num-batched-tokens", "1000000000000"), "engine max_num_seqs is 1000000000000, which needs"),
        (("--kv-cache-tokens", "1000000000000"), "engine kv_cache_tokens is 1000000000000, which needs"),
        (("--swap-space", "1000000"), "engine swap_space is 1000000.0, which needs"),
        (("--speculative-config", "[" * 10_000), "--speculative-config is not JSON"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1000000000}'), "must be below max_num_batched_tokens"),
        (("--output", ""), "--output is ''"),
    ],
)
def test_generate_refuses_what_the_machine_cannot_hold(command, model: Path, options: tuple[str, ...], says: str) -> None:
    assert says in command("generate", model, "--prompt", "1=", *options).refusal()


def test_top_k_of_more_than_any_number_of_tokens_is_all_of_them(command, model: Path) -> None:
    given = ("generate", model, "--prompt", "1=", "--max-tokens", "3", "--seed", "1")
    whole, huge = (command(*given, *top) for top in ((), ("--top-k", "9223372036854775807")))
    assert huge.code == 0 and huge.out == whole.out


def test_a_new_vocabulary_that_the_machine_cannot_hold_is_refused(command, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("hello world\n" * 20)
    given = ("tokenize", tmp_path / "source", tmp_path / "tokens", "--tokenizer", tmp_path / "new", "--new-vocabulary")
    assert "the new vocabulary has 1,000,000,000 tokens, which take 93 GiB" in command(*given, "1000000000").refusal()
    # The text yields fewer than are asked for, which the trainer of the library allocates at once.
    assert "the text yields only" in command(*given, "50000000").out


def test_evaluate_refuses_more_prompts_than_the_machine_can_hold(command, model: Path) -> None:
    assert "--prompts is 1000000000: with completions" in command("evaluate", model, "--task", "sort", "--prompts", "1000000000").refusal(1)


def test_a_runner_that_calls_a_traceback_a_hang_and_an_abort_by_their_names() -> None:
    said = "tandem: no"
    for outcome, kind in [
        (Outcome(2, said, 0.1, 0), "refused"), (Outcome(1, said, 0.1, 0), "failed"), (Outcome(0, "", 0.1, 0), "accepted"),
        (Outcome(2, f"{said}\n{said}", 0.1, 0), "lines"), (Outcome(1, "Traceback (most recent call last):\nKeyError: 1", 0.1, 0), "traceback"),
        (Outcome(-6, said, 0.1, 0), "abort"), (Outcome(-9, said, 0.1, 0, is_late=True), "hang"), (Outcome(2, said, 0.1, 2**31), "memory"),
        (Outcome(70, said, 0.1, 0), "status"),
    ]:  # fmt: skip
        assert outcome.kind == kind


def test_the_committed_table_has_every_part_and_no_defect() -> None:
    text = sorted((ROOT / "benchmarks" / "results").glob("absurd-values-*.md"))[-1].read_text(encoding="utf-8")
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][2:]
    parts = {row[0]: row for row in rows}
    assert len(parts) == 8 and all(row[6] == "0" for row in parts.values())
    # A key that is refused whatever its value has one case, which a table of one in N cases may leave out.
    cases = Counter(case.name for case in recipe_cases(Recipe, Path("recipe.yaml")))
    assert int(parts["recipes of reinforcement learning"][1]) >= sum(count > 1 for count in cases.values())
