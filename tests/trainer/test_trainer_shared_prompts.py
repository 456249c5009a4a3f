"""The prompt of a group, computed once: the same bits of log-probabilities, and the same gradients."""

import math
import random
from dataclasses import replace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.recipe import recipe_of
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.api import TokenLogprobs
from tandem.kernels.mixed import in_precision
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ExpertShapes, ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.recompute import Recompute
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.logprobs import _can_share, sequence_logprobs
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.micro_batch import MicroBatch, collate, forward_tokens
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.packing import pack_shares, packed_tokens
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica, Replica
from tandem.trainer.step import predict
from tandem.types import Batch, RoutedExperts, TrainSequence, UserError

CONFIG = AlgorithmConfig(kl_coef=0.1, dual_clip=3.0, loss_agg_mode="seq-mean-token-mean")
PLAIN = {"architecture": "qwen3", "qk_norm": True}
WINDOWED = {"architecture": "mistral", "layer_windows": (24, 24), "qk_norm": False}
LATENT = {
    "architecture": "deepseek_v3", "qk_norm": False, "num_key_value_heads": 4, "head_dim": 24, "latent": LatentAttention(24, 16, 8, 12, 20),
    "rotary_interleaved": True,
}  # fmt: skip

LINEAR = {"architecture": "qwen3_next", "attention_gate": True, "linear_attention": LinearAttention((0,), 2, 4, 12, 10, 4)}
FAMILIES = [*map(pytest.param, (PLAIN, WINDOWED, LATENT)), pytest.param(LINEAR, marks=pytest.mark.full)]
NAMES = ["full attention", "sliding window", "latent attention", "linear attention"]


def sequence(id: str, prompt: tuple[int, ...], completion: list[int], mask: list[float], draw: random.Random) -> TrainSequence:
    before = (0.0,) * len(prompt)
    logprobs = lambda: before + tuple(-draw.uniform(2.5, 5.0) for _ in completion)
    return TrainSequence(
        id, (*prompt, *completion), len(prompt), before + tuple(mask), before + (draw.uniform(-2, 2),) * len(completion), logprobs(), logprobs(), logprobs()
    )


def groups(seed: int, prompts: int = 3, members: int = 4, prompt_tokens: int = 30, vocabulary: int = 41) -> list[TrainSequence]:
    """Returns groups with a common prompt each, as long as those of ``prompt_tokens``, and completions of 1 to 20 tokens, some of them masked in part. Half of
    the completions begin as the one before them."""
    draw, made = random.Random(seed), []
    for group in range(prompts):
        prompt, before = tuple(draw.randrange(vocabulary) for _ in range(prompt_tokens + group)), list[int]()
        for member in range(members):
            length = draw.randint(1, 20)
            mask = [float(draw.random() > 0.2) for _ in range(length)]
            begun = before[: draw.randrange(length)] if draw.random() < 0.5 else []
            before = begun + [draw.randrange(vocabulary) for _ in range(length - len(begun))]
            made.append(sequence(f"{group}/{member}", prompt, before, mask, draw))
    return [s for s in made if forward_tokens(s)]


def small_model(kernels: str, dtype: torch.dtype, **family: object) -> Decoder:
    sizes = {
        "vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = ModelShapes(**{**sizes, **PLAIN, **family})  # type: ignore[arg-type]
    model = Decoder(shapes, select(kernels, dtype), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def gradients(model: Decoder, sequences: list[TrainSequence], share_prompts: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the raw log-probabilities and the gradient of the policy loss."""
    model.zero_grad(set_to_none=True)
    micro_batch = collate(sequences, model.dtype, share_prompts=share_prompts)
    outputs = predict(model, micro_batch, 0.7)
    make_policy_loss(CONFIG, counts_of(sequences), 0.7)(outputs, micro_batch).loss.backward()
    return outputs.logprobs.raw.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    difference = math.fsum((found[name].double() - wanted[name].double()).square().sum().item() for name in wanted)
    return math.sqrt(difference / math.fsum(value.double().square().sum().item() for value in wanted.values()))


def test_layout_of_sequences_that_begin_alike_by_hand() -> None:
    draw = random.Random(0)
    first, second = sequence("a", (5, 6, 7), [8, 9], [1.0, 1.0], draw), sequence("b", (5, 6, 7), [10, 11, 12], [1.0, 0.0, 1.0], draw)
    other, longer = sequence("c", (5, 6), [7, 13], [1.0, 1.0], draw), sequence("d", (5, 6, 7), [8, 14, 15], [1.0, 1.0, 1.0], draw)
    batch = collate([first, second, other, longer], torch.float64, share_prompts=True)
    # The last token of a sequence predicts nothing and is left out. Of c, whose prompt is another, nothing but its predictions is left; d has a token more
    # than a, whose completion begins as its own does.
    assert batch.tokens.tolist() == [5, 6, 7, 8, 10, 11, 14]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 4, 9, 12, 17] and batch.max_seqlen == 5
    assert batch.prompts is not None and batch.prompts.query_start.tolist() == [0, 4, 6, 6, 7]
    assert batch.prompts.rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 0, 1, 2, 3, 6]
    assert batch.rows.tolist() == [2, 3, 2, 5, 1, 2, 2, 3, 6] and batch.targets.tolist() == [8, 9, 10, 12, 7, 13, 8, 14, 15]
    assert batch.sequence_of_row.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert packed_tokens([first, second, other, longer], True) == 7


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_gradients_equal_those_of_separate_copies_in_float64(family: dict[str, object]) -> None:
    model, sequences = small_model("reference", torch.float64, **family), groups(1)
    logprobs, wanted = gradients(model, sequences, False)
    shared, found = gradients(model, sequences, True)
    # In float64 the products are torch's own, which give a row different bits when the number of rows changes.
    assert (shared - logprobs).abs().max() < 1e-12
    assert distance(found, wanted) < 1e-13


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_log_probabilities_have_the_same_bits_and_gradients_are_those_of_float64(kernels: str, family: dict[str, object]) -> None:
    model, sequences = small_model(kernels, torch.float32, **family), groups(2)
    logprobs, separate = gradients(model, sequences, False)
    shared, found = gradients(model, sequences, True)
    assert torch.equal(shared, logprobs)
    exact = gradients(small_model("reference", torch.float64, **family), sequences, False)[1]
    assert distance(found, exact) < 2 * max(distance(separate, exact), 1e-6)


def test_long_prompts_whose_keys_are_several_sections_of_the_backward_pass() -> None:
    model, sequences = small_model("cpu", torch.float32), groups(3, prompts=1, members=3, prompt_tokens=700)
    logprobs, _ = gradients(model, sequences, False)
    shared, found = gradients(model, sequences, True)
    assert torch.equal(shared, logprobs)
    assert distance(found, gradients(small_model("reference", torch.float64), sequences, False)[1]) < 1e-5


@pytest.mark.parametrize("family", [FAMILIES[0], *FAMILIES[2:]], ids=[NAMES[0], *NAMES[2:]])
def test_recomputed_layers_give_the_same_gradients(family: dict[str, object]) -> None:
    sequences = groups(4)
    model = small_model("cpu", torch.float32, **family)
    _, wanted = gradients(model, sequences, True)
    for how in ("full", "selective"):
        model.recompute = how
        _, found = gradients(model, sequences, True)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 64), (1, 1000), (2, 100), (4, 200)])
def test_groups_are_packed_together_into_chunks_that_hold_them(ranks: int, capacity: int) -> None:
    sequences = groups(6, prompts=8, members=8)
    shares = pack_shares(sequences, ranks, capacity, share_prompts=True)
    assert sorted(i for bins in shares for chosen in bins for i in chosen) == list(range(len(sequences)))
    tokens = [[packed_tokens([sequences[i] for i in chosen], True) for chosen in bins] for bins in shares]
    assert all(count <= capacity for bins in tokens for count in bins)
    for bins, counts in zip(shares, tokens, strict=True):
        assert counts == [len(collate([sequences[i] for i in chosen], share_prompts=True).tokens) for chosen in bins]
    separate = sum(forward_tokens(s) for s in sequences)
    loads = [sum(bins) for bins in tokens]
    assert sum(loads) < (0.75 if capacity == 64 else 0.6) * separate
    # A unit is at most half of a share, so the fullest rank is at most half a share above the mean.
    assert max(loads) <= 1.5 * sum(loads) / ranks + max(map(len, {s.token_ids[: s.prompt_length] for s in sequences}))


def test_update_with_shared_prompts_is_the_update_without_and_says_what_it_saved() -> None:
    batch, results = Batch(0, tuple(groups(7, prompts=4))), {}
    for share in (False, True):
        model = small_model("cpu", torch.float32)
        settings = TrainerConfig(learning_rate=1e-3, micro_batch_tokens=120, share_prompts=share)
        replica = Replica(alone(), model, AdamW(model.named_parameters(), settings))
        results[share] = update_policy(replica, batch, replace(CONFIG, old_logprobs="recompute"), settings), model
    (plain, one), (shared, other) = results[False], results[True]
    assert shared.metrics == pytest.approx(plain.metrics, rel=1e-5, abs=1e-7)
    assert shared.metrics["mismatch_kl"] == plain.metrics["mismatch_kl"], "log-probabilities keep their bits"
    for name, parameter in other.named_parameters():
        assert torch.allclose(parameter, dict(one.named_parameters())[name], atol=2e-5)
    assert plain.packing["perf/shared_prompt_share"] == 0.0
    assert plain.tokens == sum(map(forward_tokens, batch.sequences))
    assert shared.packing["perf/shared_prompt_share"] == pytest.approx(1 - shared.tokens / plain.tokens) and shared.tokens < 0.65 * plain.tokens
    for result in (plain, shared):
        assert result.packing["perf/padding_share"] == pytest.approx(1 - result.tokens / (120 * result.packing["perf/micro_batches"]))


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_pass_without_gradient_computes_equal_beginnings_once_and_has_the_bits_of_separate_copies(
    monkeypatch: pytest.MonkeyPatch, kernels: str, family: dict[str, object]
) -> None:
    sequences, model, seen = groups(8), small_model(kernels, torch.float32, **family), list[int]()
    frozen, forward = FrozenReplica(alone(), model), model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, *rest: [seen.append(len(tokens)), forward(tokens, *rest)][1])
    found = sequence_logprobs(frozen, sequences, 4096, 0.7)
    assert seen == [packed_tokens(sequences, True)] and seen[0] < 0.6 * packed_tokens(sequences, False)
    assert sequence_logprobs(frozen, sequences, 100, 0.7) == found
    with monkeypatch.context() as patched:
        patched.setattr("tandem.trainer.logprobs._can_share", lambda *_: False)
        seen.clear()
        assert sequence_logprobs(frozen, sequences, 4096, 0.7) == found
    assert seen == [packed_tokens(sequences, False)]


@pytest.mark.parametrize("case", ["float64", "fp8", "recorded routing"])
def test_a_pass_without_gradient_computes_each_sequence_by_itself_where_sharing_changes_results(case: str) -> None:
    model, sequences = small_model("reference", torch.float64 if case == "float64" else torch.float32), groups(8)
    if case == "fp8":
        model.kernels = in_precision(model.kernels, "fp8", model.device)
    if case == "recorded routing":
        sequences = [replace(each, routed_experts=RoutedExperts(1, 1, 1, bytes(len(each.token_ids) - 1))) for each in sequences]
    assert not _can_share(FrozenReplica(alone(), model), sequences)
    assert _can_share(FrozenReplica(alone(), small_model("reference", torch.float32)), groups(8))


def of_all_rows(model: Decoder, batch: MicroBatch) -> TokenLogprobs:
    """Returns the log-probabilities of a pass in which every layer computes all rows."""
    hidden = model(batch.tokens, batch.positions, batch.context)
    return model.head_outputs(hidden, batch.rows, batch.targets, 0.7, len(batch.tokens)).logprobs


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_pass_leaves_out_the_last_mlp_of_tokens_that_predict_nothing_and_has_the_bits_of_one_with(
    monkeypatch: pytest.MonkeyPatch, kernels: str, family: dict[str, object], share_prompts: bool, with_gradient: bool
) -> None:
    model, batch = small_model(kernels, torch.float32, **family), collate(groups(9), share_prompts=share_prompts)
    whole, seen, gated = of_all_rows(model, batch), list[int](), model.kernels.silu_mul
    monkeypatch.setattr(model.kernels, "silu_mul", lambda x: [seen.append(len(x)), gated(x)][1])
    with torch.set_grad_enabled(with_gradient):
        predicted = predict(model, batch, 0.7).logprobs
    assert torch.equal(predicted.raw, whole.raw) and torch.equal(predicted.scaled, whole.scaled) and torch.equal(predicted.entropy, whole.entropy)
    assert seen[-1] == len(set(batch.rows.tolist())) < 0.9 * len(batch.tokens)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_gradients_are_those_of_a_pass_over_all_rows_in_float64(family: dict[str, object], recompute: Recompute) -> None:
    model, batch = small_model("reference", torch.float64, **family), collate(groups(10), torch.float64)
    weights, found = torch.linspace(-1, 1, len(batch.rows), dtype=torch.float64), list[dict[str, torch.Tensor]]()
    model.recompute = recompute
    for logprobs in (of_all_rows(model, batch), predict(model, batch, 0.7).logprobs):
        model.zero_grad(set_to_none=True)
        (logprobs.scaled * weights).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert distance(found[1], found[0]) < 1e-13


def test_a_mixture_of_experts_in_the_last_layer_sees_every_token() -> None:
    model, batch = small_model("cpu", torch.float32, architecture="qwen3_moe", experts=ExpertShapes(4, 2, 16)), collate(groups(9))
    context, rows = model.wanting(batch.context, batch.rows, len(batch.tokens))
    assert context.wanted is None and rows is batch.rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel": {"context": 2}}, "parallel.context is 2"),
        ({"trainer": {"share_prompts": True, "router_balance_loss": 0.1}}, "a prompt's tokens count once in the balance of experts"),
        ({"algorithm": {"name": "sft"}, "data": {"train": []}}, "whose passes share no prompt"),
    ],
)
def test_what_shared_prompts_cannot_be_combined_with_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe_of({"model": {"path": "model"}, "task": {"name": "sort"}, "trainer": {"share_prompts": True}, **change})
