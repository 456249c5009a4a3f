"""A recipe's ``rollout.engine``: every option reaches the engine, and none changes a token or a log-probability."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pod_runs import RECIPE, PodRun, difference

from tandem.config.load import apply_overrides, build, read_yaml
from tandem.config.recipe import Recipe
from tandem.engine.llm import LLM
from tandem.kernels import select
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model, read_tensors
from tandem.pod.prompts import prompt_source
from tandem.pod.rollout_worker import RolloutWorker
from tandem.rl.algorithms.batch import train_sequence
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica
from tandem.types import Sample, WeightVersion
from tandem.types.wire_records import decode_samples, encode_prompts, samples_from_text, samples_to_text

NO_SAMPLES = samples_to_text([])
OVERRIDES = (
    "model.create.initializer_range=0.3", "task.max_digits=6", "rollout.max_tokens=24", "rollout.prompts_per_step=6",
)  # fmt: skip


def recipe_of(engine: dict[str, Any]) -> Recipe:
    data = apply_overrides(read_yaml(RECIPE), OVERRIDES)
    data["rollout"]["engine"] = engine
    return build(Recipe, data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    create = recipe_of({}).model.create
    assert create is not None
    made = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("draft", 1)):
        create_model(create, seed, made / name)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_model(folder / "model", select())


def roll_out(engine: dict[str, Any], folder: Path, model: Decoder, directory: Path) -> tuple[list[Sample], LLM]:
    """Returns the samples of step 0 with the weights of ``model``, drawn by the pod's worker for a recipe with these options."""
    recipe = recipe_of(engine)
    (directory / "pod").mkdir(exist_ok=True)
    worker = RolloutWorker(recipe, directory)
    worker.start_engine({"folder": str(folder / "model"), "kernels": "auto"}, {}, lambda *_: None)
    assert worker.llm is not None
    worker.llm.update_weights(read_tensors(folder / "model"), WeightVersion(0, 0))
    prompts = prompt_source(recipe, folder / "model").for_step(0)
    settings = sampling_settings(recipe.rollout, recipe.algorithm.group_size, recipe.run.seed)
    streamed: list[Sample] = []
    hear = lambda progress: streamed.extend(samples_from_text(progress.get("samples", NO_SAMPLES)))
    _, blobs = worker.rollout({"settings": settings, "step": 0, "weights": 0, "stream": True}, {"prompts": encode_prompts(prompts)}, hear)
    assert decode_samples(blobs["samples"]) == [], "each was streamed"
    samples = sorted(streamed, key=lambda sample: sample.id)
    assert len(samples) == len(prompts) * recipe.algorithm.group_size == len({sample.id for sample in samples}), "each was streamed once"
    return samples, worker.llm


@pytest.fixture(scope="module")
def plain(folder: Path, model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sample]]:
    samples, llm = roll_out({}, folder, model, tmp_path_factory.mktemp("plain"))
    with llm:
        yield samples


def test_samples_have_the_trainers_own_log_probabilities(plain: list[Sample], model: Decoder) -> None:
    own = sequence_logprobs(FrozenReplica(alone(), model), [train_sequence(sample) for sample in plain], 4096)
    for sample in plain:
        counted = own[sample.id][len(sample.prompt_token_ids) :]
        assert counted == sample.logprobs and len(set(sample.logprobs)) > 1


SMALL_CACHE = {"kv_cache_tokens": 96, "max_num_seqs": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "static batches over static KV": {"batching": "static", "cache_implementation": "static"},
    "dynamic batches": {"batching": "dynamic", "max_num_seqs": 8},
    "whole prompts, no prefix cache": {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "swap": {**SMALL_CACHE, "preemption_mode": "swap", "swap_space": 0.001},
    "recompute": {**SMALL_CACHE, "preemption_mode": "recompute"},
    "steps ahead": {"async_scheduling": True},
    "guesses looked up": {
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "disable_by_batch_size": 64, "adaptive": False}
    },
    "drafts of the group": {"speculative_config": {"method": "suffix", "disable_by_batch_size": 64}},
}


@pytest.mark.parametrize("engine", OPTIONS.values(), ids=OPTIONS)
def test_an_option_changes_no_token_and_no_log_probability(
    engine: dict[str, Any], plain: list[Sample], folder: Path, model: Decoder, tmp_path: Path
) -> None:
    samples, llm = roll_out(engine, folder, model, tmp_path)
    with llm:
        assert samples == plain
        transitions = {transition.name.lower(): count for transition, count in llm.engine.transitions().items()}
        speculation = llm.engine.cumulative_stats().speculation
        assert (transitions["swap_out"] > 0) == ("swap_space" in engine)
        assert (transitions["recompute"] > 0) == (engine.get("preemption_mode") == "recompute")
        assert (speculation.proposed > 0) == ("speculative_config" in engine)


@pytest.mark.full
@pytest.mark.parametrize("is_target", [True, False])
def test_a_draft_model_changes_no_token_and_no_log_probability(
    is_target: bool, plain: list[Sample], folder: Path, model: Decoder, tmp_path: Path
) -> None:
    draft = {"method": "draft", "model": str(folder / ("model" if is_target else "draft")), "disable_by_batch_size": 64}
    samples, llm = roll_out({"speculative_config": draft}, folder, model, tmp_path)
    with llm:
        speculation = llm.engine.cumulative_stats().speculation
        assert samples == plain and speculation.proposed > 0
        assert (speculation.accepted > 0.9 * speculation.proposed) == is_target


@pytest.mark.full
def test_a_run_whose_engine_has_two_tensor_ranks_that_guess_is_the_run_of_one(tmp_path: Path) -> None:
    guesses = "{method: ngram, prompt_lookup_min: 1, disable_by_batch_size: 64}"
    one, two = PodRun(tmp_path / "one"), PodRun(tmp_path / "two")
    for run, options in (
        (one, ()),
        (two, ("--rollout.engine.tensor_parallel_size=2", f"--rollout.engine.speculative_config={guesses}")),
    ):
        done = run.train("--run.max_steps=3", "--model.create.num_key_value_heads=2", "--machine.threads=2", *options)
        assert done.returncode == 0, done.stderr
        assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 3
    assert difference(two, one) == []
