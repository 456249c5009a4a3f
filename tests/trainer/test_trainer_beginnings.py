"""Equal beginnings of sequences, which training computes once: gradients have the bits of a batch in which every token is computed."""

import gc
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from beginnings_peak import shapes_of

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import training_memory
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.kernels import select
from tandem.kernels.cpu import trained_layers
from tandem.kernels.trained_layers import Beginnings
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.trainer.beginnings import beginnings_of, computes_beginnings_once
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.micro_batch import collate, forward_tokens
from tandem.trainer.offload import activations
from tandem.trainer.step import predict
from tandem.types import TrainSequence

CONFIG = AlgorithmConfig(kl_coef=0.1, dual_clip=3.0)
FAMILIES = {
    "norms of heads": {"architecture": "qwen3", "qk_norm": True},
    "biases": {"architecture": "qwen2", "qk_norm": False, "attention_bias": True},
    "sliding windows": {"architecture": "mistral", "qk_norm": False, "layer_windows": (5, 5)},
    "one layer": {"architecture": "llama", "qk_norm": False, "num_hidden_layers": 1},
}


def group(number: int, members: int, draw: random.Random, prompt_tokens: int = 40) -> list[TrainSequence]:
    """Returns sequences of one prompt. The first two are the same, the third has their tokens and another advantage, and the others begin as they do."""
    prompt = tuple(draw.randrange(41) for _ in range(prompt_tokens))
    first = [draw.randrange(41) for _ in range(9)]
    made = []
    for member in range(members):
        tokens = first if member < 3 else [*first[:4], *(draw.randrange(41) for _ in range(draw.randint(1, 9)))]
        mask = [1.0 if place % 4 != 2 else 0.0 for place in range(len(tokens))]
        logprobs = tuple(-3.0 - 0.1 * (token % 7) for token in tokens)
        before, advantage = (0.0,) * len(prompt), 0.5 if member < 2 else draw.uniform(-2, 2)
        kept = (*before, *logprobs)
        made.append(TrainSequence(
            f"{number}/{member}", (*prompt, *tokens), len(prompt), (*before, *mask), (*before, *[advantage] * len(tokens)), kept, kept, kept,
        ))  # fmt: skip
    return made


def batch(members: int = 5, groups: int = 4) -> list[TrainSequence]:
    """Returns the sequences of several groups, one of each after the other, so that equal ones are not side by side."""
    draw = random.Random(3)
    made = [group(number, members, draw) for number in range(groups)]
    return [sequences[member] for member in range(members) for sequences in made]


def model_of(kernels: str, family: dict[str, object], dtype: torch.dtype = torch.float32) -> Decoder:
    sizes = {
        "vocab_size": 41, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 80, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    if "layer_windows" in family:
        sizes["num_hidden_layers"] = 2
    model = Decoder(ModelShapes(**{**sizes, **family}), select(kernels, dtype), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def gradients(model: Decoder, sequences: list[TrainSequence], finds_beginnings: bool) -> dict[str, torch.Tensor]:
    """Returns the log-probabilities and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    micro_batch = collate(sequences, model.dtype, finds_beginnings=finds_beginnings)
    assert (micro_batch.beginnings is not None) == finds_beginnings
    outputs = predict(model, micro_batch, 0.7)
    make_policy_loss(CONFIG, counts_of(sequences), 0.7)(outputs, micro_batch).loss.backward()
    assert outputs.of_language is not None
    return {"log-probabilities": outputs.of_language.raw.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_bits(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of values whose bits differ."""
    assert values.keys() == others.keys()
    return [name for name in values if not torch.equal(values[name].view(torch.int32), others[name].view(torch.int32))]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_the_bits_of_a_batch_in_which_every_token_is_computed_and_are_those_of_float64(family: str) -> None:
    model, sequences = model_of("cpu", FAMILIES[family]), batch()
    assert computes_beginnings_once(model)
    once = gradients(model, sequences, True)
    assert same_bits(once, gradients(model, sequences, False)) == []
    reference = model_of("reference", FAMILIES[family], torch.float64)
    assert not computes_beginnings_once(reference)
    for name, value in gradients(reference, sequences, False).items():
        assert (once[name] - value).norm() < 2e-5 * value.norm(), name


def test_the_forward_pass_computes_distinct_tokens_and_the_backward_pass_distinct_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences, forward, backward = model_of("cpu", FAMILIES["norms of heads"]), batch(), set[int](), set[int]()
    calls = model.kernels._calls
    linear, grad_x = calls.linear, calls.linear_grad_x
    monkeypatch.setattr(calls, "linear", lambda x, *others: (forward.add(len(x)), linear(x, *others))[1])
    monkeypatch.setattr(calls, "linear_grad_x", lambda grad, *others, **more: (backward.add(len(grad)), grad_x(grad, *others, **more))[1])
    gradients(model, sequences, True)
    tokens = [sequence.token_ids[: forward_tokens(sequence)] for sequence in sequences]
    distinct = {token[:end] for token in tokens for end in range(1, len(token) + 1)}
    # Of each group the second sequence is the first one.
    own = [length for sequence, length in zip(sequences, map(len, tokens), strict=True) if not sequence.id.endswith("/1")]
    assert max(forward) == len(distinct) < 0.4 * sum(map(len, tokens))
    predicting = sum(1 for sequence in sequences for counted in sequence.loss_mask if counted)
    assert sum(own) in backward and max(backward - {predicting}) == sum(own)


def test_a_batch_of_one_sequence_many_times_has_the_gradients_of_every_token_computed() -> None:
    model, first = model_of("cpu", FAMILIES["norms of heads"]), group(0, 1, random.Random(1))[0]
    sequences = [replace(first, id=str(number)) for number in range(70)]
    assert same_bits(gradients(model, sequences, True), gradients(model, sequences, False)) == []


def test_what_layers_keep_is_offloaded_and_the_gradients_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    model, sequences = model_of("cpu", FAMILIES["norms of heads"]), batch()
    once = gradients(model, sequences, True)
    offload = activations.ActivationOffload(model, tmp_path, 2**20)
    assert same_bits(once, gradients(model, sequences, True)) == []
    micro_batch = collate(sequences, model.dtype, finds_beginnings=True)
    assert micro_batch.beginnings is not None
    # In fp32, of each layer but the last, which computes fewer tokens: two norms' inputs and outputs, q (twice), k (twice), v, attention, gate and up, gated.
    each = 4 * 48 + 2 * 64 + 3 * 32 + 64 + 3 * 80
    assert offload.written_bytes >= 4 * len(micro_batch.beginnings.first) * each * (model.shapes.num_hidden_layers - 1)


def test_gradients_of_a_layer_are_there_before_those_of_the_layer_below_it_are_computed() -> None:
    model, came = model_of("cpu", FAMILIES["norms of heads"]), list[int]()
    for index, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: came.append(index))
    calls, at = model.kernels._calls, dict[int, int]()
    backward = calls.gate_mul_backward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calls, "gate_mul_backward", lambda *given: (at.setdefault(len(at), len(came)), backward(*given))[1])
        gradients(model, batch(), True)
    each = len(came) // 3
    assert sorted(came, reverse=True) == came and [at[place] for place in range(3)] == [0, each, 2 * each]


def test_what_a_pass_keeps_is_freed_with_it_and_not_by_the_collector_of_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        gradients(model_of("cpu", FAMILIES["norms of heads"]), batch(), True)
        assert not [made for made in gc.get_objects() if type(made).__module__ == trained_layers.__name__ and not isinstance(made, type)]
    finally:
        gc.enable()


def test_gradients_of_two_micro_batches_are_added_and_frozen_weights_have_none() -> None:
    model, sequences = model_of("cpu", FAMILIES["norms of heads"]), batch()
    for frozen in (model.embed_tokens, *model.layers[0].parameters()):
        frozen.requires_grad_(False)
    once, plain = (gradients(model, sequences, finds) for finds in (True, False))
    assert same_bits(once, plain) == [] and not any(name.startswith(("layers.0.", "embed")) for name in once)
    added = []
    for finds in (True, False):
        model.zero_grad(set_to_none=True)
        for part in (sequences[:10], sequences[10:]):
            micro_batch = collate(part, model.dtype, finds_beginnings=finds)
            make_policy_loss(CONFIG, counts_of(sequences), 0.7)(predict(model, micro_batch, 0.7), micro_batch).loss.backward()
        added.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert same_bits(*added) == []


def test_beginnings_of_three_sequences_by_hand() -> None:
    wanted = Beginnings(
        torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 3, 0, 1]), torch.tensor([0, 1, 2, 8]), torch.tensor([0, 3, 6, 9, 11]), torch.tensor([0, 3, 3, 4, 4])
    )
    beginnings = beginnings_of([(5, 6, 7), (5, 6, 7), (5, 6, 8), (5, 6)])
    assert beginnings is not None
    assert [x.tolist() for x in beginnings] == [x.tolist() for x in wanted]
    assert beginnings_of([(1, 2, 3), (1, 5, 6), (7, 8, 9)]) is None


def test_layers_that_are_recomputed_or_wrapped_compute_every_token() -> None:
    model = model_of("cpu", FAMILIES["norms of heads"])
    assert computes_beginnings_once(model)
    model.recompute = "full"
    assert not computes_beginnings_once(model)
    model.recompute, model.around_layer = "none", lambda index, layer, x, residual: layer(x, residual)
    assert not computes_beginnings_once(model)


@pytest.mark.full
@pytest.mark.parametrize(("layers", "sizes"), [(2, (200, 16, 8, 4)), (2, (60, 40, 2, 30)), (6, (60, 40, 4, 12))])
def test_the_peak_of_an_update_that_computes_beginnings_once_is_within_a_quarter_of_the_prediction(layers: int, sizes: tuple[int, ...]) -> None:
    command = [sys.executable, str(Path(__file__).parent / "beginnings_peak.py"), str(layers), *map(str, sizes)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    tokens, distinct = measured["tokens"], measured["distinct"] / measured["tokens"]
    assert 0 < distinct < 0.8
    layout = replace(layout_of_trainer(TrainerConfig(), ParallelConfig(), tokens), distinct=distinct)
    memory = predict_rank_memory(shapes_of(layers), layout)
    predicted = memory.activations + memory.logits
    assert predicted / 1.25 < measured["peak"] < 1.25 * predicted, (predicted, measured)


def test_a_trainer_is_predicted_with_the_more_of_both_ways_to_compute_an_update() -> None:
    trainer, parallel = TrainerConfig(), ParallelConfig()
    for layers, more_at_once in ((2, True), (24, False)):
        every = predict_rank_memory(shapes_of(layers), layout_of_trainer(trainer, parallel, 4096))
        at_most = training_memory(shapes_of(layers), trainer, parallel, 4096, kv_cache_dtype="auto")
        # With few layers the gradients of one, of all tokens, are more than what the distinct ones save.
        assert (at_most.total > every.total) == more_at_once
        assert training_memory(shapes_of(layers), trainer, parallel, 4096) == every == training_memory(shapes_of(layers), trainer, parallel, 4096, 0, "int8")
    with_all = training_memory(shapes_of(2), replace(trainer, share_prompts=True), parallel, 4096, kv_cache_dtype="auto")
    assert with_all == predict_rank_memory(shapes_of(2), layout_of_trainer(trainer, parallel, 4096))
