"""The predicted operations of a step beside those that torch counts while the trainer takes one."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tandem.config.load import build
from tandem.config.recipe import Recipe
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.rl_work import RLModels, rl_work
from tandem.estimate.time import Work
from tandem.kernels import Kernels, select
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.planner.measured_run import measured_run
from tandem.rl.algorithms.update import update_policy
from tandem.text.characters import make_character_tokenizer
from tandem.trainer.logprobs import infer_sequences
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.trainer.step import StepResult
from tandem.types import Batch, TrainSequence

SHAPES = ModelShapes("llama", 101, 32, 2, 4, 2, 8, 48, 256, tie_word_embeddings=False)
PROMPT, TEMPLATE, COMPLETION, GROUP, PROMPTS = 20, 8, 12, 4, 2
HEAD = PROMPTS * GROUP * COMPLETION * 2 * 101 * 32
"""Operations of the head for all tokens that are predicted, once."""


def samples(alike: int) -> list[TrainSequence]:
    """Returns groups whose prompts begin with a template, and their completions with the same ``alike`` tokens."""
    draw, made = random.Random(11), []
    for prompt in range(PROMPTS):
        # Beyond what they share they differ at once: by the number of the prompt, or of the completion.
        asked = (*range(TEMPLATE), 30 + prompt, *(draw.randrange(30) for _ in range(PROMPT - TEMPLATE - 1)))
        begin = [draw.randrange(30) for _ in range(alike)]
        for member in range(GROUP):
            tokens = (*asked, *begin, *([40 + member, *(draw.randrange(30) for _ in range(COMPLETION - alike - 1))]))
            before = (0.0,) * PROMPT
            logprobs = before + (-3.0,) * COMPLETION
            advantages = before + (draw.uniform(-1, 1),) * COMPLETION
            made.append(TrainSequence(f"{prompt}/{member}", tokens, PROMPT, before + (1.0,) * COMPLETION, advantages, logprobs))
    return made


def recipe(kernels: str = "reference", **sections: dict[str, object]) -> Recipe:
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": {"prompts_per_step": PROMPTS, "max_tokens": COMPLETION}}
    data |= {"machine": {"kernels": kernels}, "algorithm": {"group_size": GROUP, "kl_coef": 0.0} | sections.get("algorithm", {})}
    return build(Recipe, data | {"trainer": sections.get("trainer", {})})


def model(dtype: torch.dtype, kernels: Kernels | None = None) -> Decoder:
    """Returns a model whose products are torch's, in fp32 as well, so that its counter sees them, or those of ``kernels``."""
    network = Decoder(SHAPES, kernels or ReferenceKernels(tiled=False), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(1.0 if parameter.ndim == 1 else 0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def added_product(total: torch.Size, first: torch.Size, second: torch.Size, out_shape: torch.Size | None = None, **rest: object) -> int:
    """Returns the operations of ``addmm_``, which torch's counter does not know in place."""
    return 2 * first[0] * first[1] * second[1]


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})


def counted(counter: FlopCounterMode) -> int:
    """Returns the operations of products with a matrix; attention's are batched."""
    return sum(count for operation, count in counter.get_flop_counts()["Global"].items() if "bmm" not in str(operation))


def flops(work: Work) -> float:
    return sum(times * product.flops for product, times in work.products.items())


def known(sequences: list[TrainSequence]) -> Prompts:
    return Prompts.of([each.token_ids[:PROMPT] for each in sequences[::GROUP]])


def counted_in_layers(monkeypatch: pytest.MonkeyPatch, kernels: CpuKernels) -> list[int]:
    """Returns the list that receives the operations of each product of the C++ ``kernels`` with a layer's matrix, which torch does not see; not the head's,
    which have as many outputs as the vocabulary."""
    operations, calls = list[int](), kernels._calls
    by_rows: dict[str, Callable[..., tuple[int, torch.Size]]] = {
        "linear": lambda x, weight, *_: (len(x), weight.shape), "linear_grad_x": lambda grad, weight, *_: (len(grad), weight.shape),
        "linear_grad_weight": lambda grad, x, *_: (len(x), torch.Size((grad.shape[1], x.shape[1]))),
        "repeated_grad_weight": lambda grad, x, rows: (rows.count, torch.Size((grad.shape[1], x.shape[1]))),
    }  # fmt: skip

    def counts(name: str) -> Callable[..., torch.Tensor]:
        compute = getattr(calls, name)

        def counted_call(*given: Any, **named: Any) -> Any:
            rows, (outputs, inputs) = by_rows[name](*given)
            operations.extend([2 * rows * outputs * inputs] * (outputs != SHAPES.vocab_size))
            return compute(*given, **named)

        return counted_call

    for name in by_rows:
        monkeypatch.setattr(calls, name, counts(name))
    return operations


def updated(made: Recipe, sequences: list[TrainSequence]) -> tuple[StepResult, int]:
    """Returns a real update, and the operations that it took."""
    network = model(torch.float64)
    network.recompute = made.trainer.recompute
    replica = Replica(alone(), network, AdamW(network.named_parameters(), made.trainer))
    with counting() as counter:
        result = update_policy(replica, Batch(0, tuple(sequences)), made.algorithm, made.trainer)
    return result, counted(counter)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_an_update_takes_the_operations_that_torch_counts(share_prompts: bool, recompute: str) -> None:
    made, sequences = recipe(trainer={"share_prompts": share_prompts, "recompute": recompute}), samples(alike=0)
    _, operations = updated(made, sequences)
    [predicted] = rl_work(made, RLModels(SHAPES), known(sequences), COMPLETION).training
    # The reference computes logits again in the backward pass, which the prediction takes as kept.
    assert flops(predicted) + HEAD == pytest.approx(operations, rel=1e-9)
    # In all of the last layer it would be more, and more still with every prompt by itself.
    if not share_prompts:
        every = PROMPTS * GROUP * (PROMPT + COMPLETION - 1)
        behind = 2 * every * (32 * 32 + 3 * 48 * 32) * (4 if recompute == "full" else 3)
        assert operations < flops(predicted) + HEAD + behind * (1 - COMPLETION / (PROMPT + COMPLETION - 1)) * (1 + 1e-9)


@pytest.mark.parametrize(("alike", "minibatches"), [(0, 1), (5, 1), (5, PROMPTS)])
def test_an_update_on_a_cpu_computes_what_sequences_begin_with_once_in_its_forward_pass_alone(
    monkeypatch: pytest.MonkeyPatch, alike: int, minibatches: int
) -> None:
    made, sequences = recipe("cpu", algorithm={"minibatches": minibatches, "tis_cap": 2.0}), samples(alike)
    kernels = select("cpu")
    assert isinstance(kernels, CpuKernels)
    network = model(torch.float32, kernels)
    replica = Replica(alone(), network, AdamW(network.named_parameters(), made.trainer))
    operations = counted_in_layers(monkeypatch, kernels)
    update_policy(replica, Batch(0, tuple(sequences)), made.algorithm, made.trainer)
    begun = alike * (GROUP - 1) / GROUP / (COMPLETION - 1)
    prompts = known(sequences)
    predicted = rl_work(made, RLModels(SHAPES), prompts, COMPLETION, begun).training
    heads = 3 * HEAD + (len(predicted) - 1) * HEAD * (PROMPTS - 1) / PROMPTS
    assert sum(map(flops, predicted)) - heads == pytest.approx(sum(operations), rel=1e-9)
    # Other kernels compute every token in both passes.
    others = rl_work(replace(made, machine=replace(made.machine, kernels="reference")), RLModels(SHAPES), prompts, COMPLETION, begun).training
    assert flops(predicted[0]) < 0.9 * flops(others[0]) and predicted[0].attention_flops < others[0].attention_flops
    assert predicted[0].moved_bytes < others[0].moved_bytes


def test_what_completions_begin_with_in_common_is_known_of_a_run_and_predicts_its_next_update_and_its_passes() -> None:
    made, sequences = recipe(trainer={"share_prompts": True}), samples(alike=5)
    result, operations = updated(made, sequences)
    prompts = known(sequences)
    unknown = rl_work(made, RLModels(SHAPES), prompts, COMPLETION)
    assert flops(unknown.training[0]) + HEAD > 1.2 * operations, "before the run it is not known"
    row = {"response_length/mean": float(COMPLETION), **result.packing}
    begun = measured_run(made, SHAPES, [row], prompts).begun
    # Three of four completions have five of their eleven tokens of the first.
    assert begun == pytest.approx(3 * 5 / (4 * 11))
    assert flops(rl_work(made, RLModels(SHAPES), prompts, COMPLETION, begun).training[0]) + HEAD == pytest.approx(operations, rel=1e-9)


@pytest.mark.parametrize("micro_batch_tokens", [4096, GROUP * (PROMPT + COMPLETION), 2 * (PROMPT + COMPLETION)])
@pytest.mark.parametrize("alike", [0, 5])
def test_a_pass_without_gradient_takes_the_operations_that_torch_counts(alike: int, micro_batch_tokens: int) -> None:
    made = recipe(algorithm={"old_logprobs": "recompute", "tis_cap": 2.0}, trainer={"micro_batch_tokens": micro_batch_tokens})
    sequences = samples(alike)
    with counting() as counter:
        infer_sequences(FrozenReplica(alone(), model(torch.float32)), sequences, micro_batch_tokens)
    together = 2 if micro_batch_tokens == 2 * (PROMPT + COMPLETION) else GROUP
    begun = alike * (together - 1) / together / (COMPLETION - 1)
    predicted = rl_work(made, RLModels(SHAPES), known(sequences), COMPLETION, begun).training[1]
    assert flops(predicted) == pytest.approx(counted(counter), rel=1e-9)


def test_minibatches_and_the_pass_that_compares_the_later_ones_take_the_operations_that_torch_counts() -> None:
    made, sequences = recipe(algorithm={"minibatches": PROMPTS, "epochs": 2}), samples(alike=0)
    _, operations = updated(made, sequences)
    update, compared = rl_work(made, RLModels(SHAPES), known(sequences), COMPLETION).training
    # In float64 a pass without gradient computes each sequence by itself too.
    apart = rl_work(replace(made, trainer=replace(made.trainer, dtype="float64")), RLModels(SHAPES), known(sequences), COMPLETION).training[1]
    assert flops(update) + 2 * HEAD + flops(apart) == pytest.approx(operations, rel=1e-9) and flops(compared) < flops(apart)


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(PROMPTS * GROUP, 4096), (GROUP, 4096), (PROMPTS * GROUP, 16)])
def test_generation_takes_the_operations_that_torch_counts_in_a_real_engine(tmp_path: Path, max_num_seqs: int, tokens: int) -> None:
    make_character_tokenizer("abc", tmp_path / "tokenizer")
    save_model(model(torch.float32), tmp_path / "model", tmp_path / "tokenizer")
    engine = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": tokens}
    # In float64 the reference computes as many rows as there are, in fp32 whole tiles of them.
    llm = LLM(str(tmp_path / "model"), skip_tokenizer_init=True, kernels="reference", dtype="float64", kv_cache_tokens=1024, **engine)
    prompts = [list(each.token_ids[:PROMPT]) for each in samples(alike=0)[::GROUP]]
    # Prompts that differ from their first token on share no block.
    prompts = [[50 + number, *prompt[1:]] for number, prompt in enumerate(prompts)]
    asked = SamplingParams(n=GROUP, max_tokens=COMPLETION, ignore_eos=True, temperature=1.0, seed=3)
    with counting() as counter:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    assert {len(each.token_ids) for answer in answers for each in answer.outputs} == {COMPLETION}
    made = recipe()
    made = replace(made, rollout=replace(made.rollout, engine=replace(made.rollout.engine, **engine)))
    [predicted] = rl_work(made, RLModels(SHAPES), Prompts.of(prompts), COMPLETION).generation
    assert flops(predicted) == pytest.approx(counted(counter), rel=1e-9)
