"""The predicted work of a step of reinforcement learning: what the trainer packs, and closed forms."""

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import Any

import pytest

from tandem.config.load import build
from tandem.config.recipe import Recipe
from tandem.estimate.draft_work import draft_passes, draft_work
from tandem.estimate.packed_samples import Packing, Samples, begun_share, packed
from tandem.estimate.prompt_beginnings import MANY, Prompts, met
from tandem.estimate.rl_work import RLModels, RLWork, rl_work
from tandem.estimate.time import Product, Work
from tandem.estimate.training.layout import DraftTraining
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.trainer.packing import pack_shares, packed_tokens
from tandem.trainer.prefix_tree import PrefixTree
from tandem.types import TrainSequence

ACTOR = ModelShapes("llama", 101, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
NORMS, EMBEDDING = 7 * 32, 101 * 32
MATRICES = parameter_count(ACTOR) - NORMS - 2 * EMBEDDING
BEHIND_ATTENTION = 32 * 32 + 3 * 48 * 32
"""Of one layer."""
PROMPT, COMPLETION, GROUP, PROMPTS = 20, 12, 4, 3
READ = COMPLETION - 1
"""Nothing is predicted after the last token of a completion."""
ONCE, APART = Packing(1000, shares=True), Packing(1000)


def flops(works: tuple[Work, ...]) -> float:
    return sum(times * product.flops for work in works for product, times in work.products.items())


def attention(works: tuple[Work, ...]) -> float:
    return sum(work.attention_flops for work in works)


def work(models: RLModels = RLModels(ACTOR), **sections: Any) -> RLWork:  # noqa: B008
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": {"prompts_per_step": PROMPTS, "max_tokens": COMPLETION}}
    # Other kernels than the C++ ones compute every token of an update.
    data |= {"machine": {"kernels": "reference"}, "algorithm": {"group_size": GROUP}, **sections}
    return rl_work(build(Recipe, data), models, Prompts.of_mean(PROMPT), COMPLETION)


def passes_of(works: RLWork) -> tuple[Work, ...]:
    return (*works.inference, *works.training)


def group() -> list[TrainSequence]:
    """A group as the trainer has it: the network reads all tokens but the last."""
    return [
        TrainSequence(str(index), (*range(PROMPT), *(30 + index,) * COMPLETION), PROMPT, (0.0,) * PROMPT + (1.0,) * COMPLETION)
        for index in range(GROUP)
    ]  # fmt: skip


def samples(prompts: Prompts, count: float = 1, group: int = GROUP, begun: float = 0.0) -> Samples:
    return Samples(prompts, count, group, COMPLETION, COMPLETION**2, begun)


def test_a_group_has_the_tokens_that_the_trainer_packs() -> None:
    one = Prompts.of_mean(PROMPT)
    for shared, packing in ((False, APART), (True, ONCE)):
        assert packed(samples(one), packing).tokens == packed_tokens(group(), shared)
    # Each token attends to those before it; half of the context is their mean.
    attended = [*range(PROMPT)] + GROUP * [*range(PROMPT, PROMPT + READ)]
    once = packed(samples(one), ONCE)
    assert once.tokens * once.context / 2 == pytest.approx(sum(place + 0.5 for place in attended))
    assert packed(samples(one, group=1), ONCE) == packed(samples(one, group=1), APART)


def test_what_prompts_and_completions_begin_with_in_common_is_that_of_the_trainers_tree() -> None:
    draw = random.Random(3)
    # Prompts with a template and few kinds of tokens, one of which is the beginning of another, and one there twice.
    prompts = [(7, 7, 8, *(draw.randrange(3) for _ in range(draw.randint(4, 9)))) for _ in range(9)]
    prompts += [prompts[0], prompts[1][:5]]
    known = Prompts.of(prompts)
    tree = PrefixTree()
    for prompt in prompts:
        tree.add(prompt)
    assert known.mean * len(prompts) - known.repeated(len(prompts)).tokens == pytest.approx(len(tree))
    # Of fewer of them, the mean over all ways to choose these.
    for drawn in (2, 4):
        sizes, attended = [], []
        for chosen in itertools.combinations(prompts, drawn):
            tree = PrefixTree()
            added = [len(prompt) - len(tree.add(prompt)) for prompt in chosen]
            sizes.append(sum(map(len, chosen)) - len(tree))
            attended.append(sum((len(prompt) - own) ** 2 for prompt, own in zip(chosen, added, strict=True)))
        assert known.repeated(drawn) == pytest.approx((fmean(sizes), fmean(attended)))
    assert Prompts.with_prefix(9, 3).repeated(5) == pytest.approx((4 * 3, 4 * 9), rel=1e-5) and Prompts.of_mean(9).repeated(5).tokens == 0
    # Completions with a third of their tokens in common: of four, three have it of the first.
    own, shared = samples(known, len(prompts), begun=1 / 4), samples(known, len(prompts))
    assert packed(shared, ONCE).tokens - packed(own, ONCE).tokens == pytest.approx(len(prompts) * GROUP * READ / 4)
    assert begun_share(shared, ONCE, 1 - packed(own, ONCE).tokens / own.whole) == pytest.approx(1 / 4)
    assert begun_share(shared, APART, 0.0) == 0.0


def test_what_is_drawn_meets_marked_things_as_often_as_the_product_of_the_shares_that_are_left_says() -> None:
    for among, marked, drawn in ((9, 3, 2.0), (9, 3, 2.5), (9, 5, 4.5), (9, 6, 3.5), (9, 6, 4.0), (9, 9, 1.0), (9, 1, 9.0), (700, 40, 17.0), (4096, 4000, 1.5)):
        left = math.prod(max(Fraction(0), among - Fraction(drawn) - place) / (among - place) for place in range(marked))
        assert met(among, marked, drawn) == pytest.approx(float(1 - left), abs=1e-9), (among, marked, drawn)
    # All combinations of few.
    chosen = list(itertools.combinations(range(7), 3))
    assert met(7, 2, 3.0) == pytest.approx(sum(0 in each or 1 in each for each in chosen) / len(chosen))
    assert met(MANY, MANY, 32.0) == 1.0 and met(MANY, MANY - 64, 32.0) == pytest.approx(1.0)


def test_shorter_prompts_begin_alike_in_proportion_and_longer_ones_as_before() -> None:
    draw = random.Random(5)
    prompts = [(7, 7, 8, *(draw.randrange(3) for _ in range(draw.randint(4, 9)))) for _ in range(9)]
    short, long = Prompts.of(prompts), Prompts.of([[token for token in prompt for _ in range(5)] for prompt in prompts])
    shortened = long.with_lengths(short.mean, short.square)
    for drawn in (2, 4, 9):
        assert shortened.repeated(drawn) == pytest.approx(short.repeated(drawn))
    lengthened = short.with_lengths(long.mean, long.square)
    assert lengthened == replace(short, mean=long.mean, square=long.square)
    # Of prompts that differ in their last token alone, 100 tokens of 501: all tokens of the batch are positive, and fewer than of prompts that share nothing.
    alike = Prompts.of([(*range(500), 1000 + number) for number in range(32)]).with_lengths(100, 100**2)
    own = packed(samples(Prompts.of_mean(100), 32, 8), Packing(1 << 20, shares=True))
    made = packed(samples(alike, 32, 8), Packing(1 << 20, shares=True))
    assert made.tokens == pytest.approx(100 + 31 * 100 / 501 + 32 * 8 * READ) and 0 < made.context < 2 * (100 + COMPLETION)
    assert made.predict < made.tokens < own.tokens


def test_a_group_that_fills_several_micro_batches_has_its_prompt_in_each() -> None:
    many = [replace(each, token_ids=(*each.token_ids[:PROMPT], 50 + number, *each.token_ids[PROMPT + 1 :])) for number, each in enumerate(group() * 2)]
    for most, counts_once in ((PROMPT + 3 * READ, True), (2 * (PROMPT + READ), False), (3 * (PROMPT + READ) + 1, False)):
        shares = pack_shares(many, 1, most, share_prompts=counts_once, keep_groups=True)
        tokens = sum(packed_tokens([many[i] for i in chosen], True) for chosen in shares[0])
        assert packed(samples(Prompts.of_mean(PROMPT), group=2 * GROUP), Packing(most, 1, True, True, counts_once)).tokens == tokens


def test_a_shared_prompt_is_computed_once_in_every_pass_without_gradient_and_where_asked_in_updates() -> None:
    predicted, once = GROUP * COMPLETION, PROMPT + GROUP * READ
    for kl_coef in (0.0, 0.1):
        for shared, tokens, behind in ((False, GROUP * (PROMPT + READ), predicted), (True, once, 1 + GROUP * READ)):
            made = work(algorithm={"group_size": GROUP, "kl_coef": kl_coef}, trainer={"share_prompts": shared})
            rows = tokens * (MATRICES - BEHIND_ATTENTION) + behind * BEHIND_ATTENTION + predicted * EMBEDDING
            assert flops(made.training) == pytest.approx(3 * PROMPTS * 2 * rows)
            alike = once * (MATRICES - BEHIND_ATTENTION) + (1 + GROUP * READ) * BEHIND_ATTENTION + predicted * EMBEDDING
            assert flops(made.inference) == pytest.approx((kl_coef > 0) * PROMPTS * 2 * alike)
    shared_prompts, plain = (work(trainer={"share_prompts": each}) for each in (True, False))
    assert attention(shared_prompts.training) < attention(plain.training) and shared_prompts.generation == plain.generation


def test_every_round_of_dynamic_sampling_is_generated_and_scored_and_one_batch_is_trained_on() -> None:
    one, filters = work(), {"group_size": GROUP, "filter_groups": {"max_num_gen_batches": 5, "gen_batch_size": 2 * PROMPTS}}
    several = work(algorithm=filters)
    assert len(several.generation) == 5 and flops(several.generation) == pytest.approx(5 * 2 * flops(one.generation))
    assert several.training == one.training
    scorer = replace(ACTOR, value_head="sequence", language_head=False)
    models, reward_model = RLModels(ACTOR, reward_model=scorer), {"path": "scorer"}
    for algorithm, prompts in (({"group_size": GROUP}, PROMPTS), (filters, 5 * 2 * PROMPTS)):
        # Every sample with its prompt, through the layers and no head; behind the last attention the token that has the score.
        corrected = algorithm | {"old_logprobs": "recompute", "tis_cap": 2.0}
        alone = work(models, algorithm=corrected, reward_model=reward_model, trainer={"dtype": "float64"})
        length = PROMPT + COMPLETION
        assert flops(alone.inference) == pytest.approx(prompts * GROUP * 2 * (length * MATRICES - (length - 1) * BEHIND_ATTENTION))
        # Of a batch in one micro-batch each prompt once, where the number of rows changes no bit.
        early = work(models, algorithm=algorithm, reward_model=reward_model, trainer={"micro_batch_tokens": 100_000})
        rows = prompts * (PROMPT + GROUP * COMPLETION) * (MATRICES - BEHIND_ATTENTION) + prompts * GROUP * BEHIND_ATTENTION
        assert flops(early.inference) == pytest.approx(2 * rows)


def test_a_draft_head_learns_once_from_every_sample_with_its_prompt() -> None:
    draft = DraftTraining(eagle3_shapes(ACTOR, 50), 3)
    alone, beside = work(), work(RLModels(ACTOR, draft=draft))
    # The actor's forward pass, its logits, and the head: what three states come to, and three times a layer and logits.
    layer = 2 * 32 * (32 + 2 * 16) + 32 * 32 + 3 * 48 * 32
    each = MATRICES + EMBEDDING + 3 * 3 * 32 * 32 + 3 * (3 * layer + 4 * 50 * 32)
    assert flops(beside.training) - flops(alone.training) == pytest.approx(2 * PROMPTS * GROUP * (PROMPT + COMPLETION) * each)
    assert beside.generation == alone.generation and beside.inference == alone.inference
    # A head that proposes all tokens is worth so many passes; its part that reads three states is small in a model of many layers.
    tokens, deep = 2 * PROMPTS * GROUP * (PROMPT + COMPLETION), replace(ACTOR, num_hidden_layers=300)
    own = draft_work(deep, DraftTraining(eagle3_shapes(deep, 101), 3), "float32", tokens / 2, PROMPT + COMPLETION, 1000)
    assert flops((own,)) / (tokens * (100 * MATRICES + EMBEDDING)) == pytest.approx(draft_passes(deep, 3), rel=0.02)


def test_passes_and_updates_leave_out_what_only_tokens_that_predict_nothing_need_where_a_rank_has_all_rows() -> None:
    algorithm = {"group_size": GROUP, "kl_coef": 0.1, "old_logprobs": "recompute", "tis_cap": 2.0}
    whole, alike, predicted = PROMPTS * GROUP * (PROMPT + READ), PROMPTS * (PROMPT + GROUP * READ), PROMPTS * GROUP * COMPLETION
    behind = PROMPTS * (1 + GROUP * READ)

    def operations(tokens: int, rows: int) -> int:
        return 2 * (tokens * (MATRICES - BEHIND_ATTENTION) + rows * BEHIND_ATTENTION + predicted * EMBEDDING)

    for sections, update, inferred in (
        ({}, operations(whole, predicted), operations(alike, behind)),
        ({"trainer": {"precision": "fp8"}}, operations(whole, whole), operations(whole, whole)),
        ({"trainer": {"dtype": "float64"}}, operations(whole, predicted), operations(whole, predicted)),
        ({"parallel": {"tensor": 2}}, operations(whole, whole), operations(alike, alike)),
        ({"parallel": {"pipeline": 3}}, operations(whole, predicted), operations(alike, alike)),
    ):
        # The reference, and the policy once more beside its update.
        passes = work(algorithm=algorithm, **sections)
        assert flops(passes.inference) == pytest.approx(inferred), sections
        assert flops(passes.training) == pytest.approx(3 * update + inferred), sections
    # The last layer of a mixture of experts sees every token; the head does not.
    experts = RLModels(replace(ACTOR, experts=ExpertShapes(4, 2, 48)))
    layers = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 48 * 32)
    assert flops(work(experts, algorithm=algorithm).inference) == pytest.approx(2 * (alike * layers + predicted * EMBEDDING))
    # Nothing is shared where the balance of experts counts tokens.
    balanced = work(experts, algorithm=algorithm, trainer={"router_balance_loss": 0.1})
    assert flops(balanced.inference) == pytest.approx(2 * (whole * layers + predicted * EMBEDDING))


def test_a_critic_has_an_inference_pass_and_the_updates_of_the_actor_without_logits() -> None:
    critic = replace(ACTOR, value_head="token", language_head=False)
    ppo = {"name": "ppo", "group_size": GROUP, "minibatches": 2, "epochs": 3}
    alone, beside = work(algorithm={**ppo, "name": "reinforce_plus_plus"}), work(RLModels(ACTOR, critic=critic), algorithm=ppo)
    tokens, predicted = PROMPTS * GROUP * (PROMPT + READ), PROMPTS * GROUP * COMPLETION
    alike, behind = PROMPTS * (PROMPT + GROUP * READ), PROMPTS * (1 + GROUP * READ)
    values = alike * (MATRICES - BEHIND_ATTENTION) + behind * BEHIND_ATTENTION
    update = tokens * (MATRICES - BEHIND_ATTENTION) + predicted * BEHIND_ATTENTION
    assert flops(passes_of(beside)) - flops(alone.training) == pytest.approx(2 * (3 * 3 * update + values))
    assert not any(product == Product(product.rows, 101, 32) for product in beside.training[-1].products), "a value head has no logits"
    assert flops(beside.inference) == pytest.approx(2 * values), "its values"
    # What the first minibatch does not see is compared with the rollout before it.
    one = work(algorithm={**ppo, "name": "reinforce_plus_plus", "minibatches": 1})
    assert flops(alone.training) - flops(one.training) == pytest.approx(values + predicted * EMBEDDING)


def test_what_an_update_on_a_cpu_computes_once_is_counted_once_in_its_forward_pass_where_little_is_distinct() -> None:
    def updates(**sections: Any) -> list[float]:
        algorithm = {"group_size": GROUP, "kl_coef": 0.0}
        return [flops(work(machine={"kernels": kernels}, algorithm=algorithm, **sections).training) for kernels in ("cpu", "reference")]

    once, every = updates()
    # Of a group's tokens the forward pass has each prompt once, and the end of the last layer one of its last tokens.
    left_out = PROMPTS * ((GROUP - 1) * PROMPT * (MATRICES - BEHIND_ATTENTION) + (GROUP - 1) * BEHIND_ATTENTION)
    assert every - once == pytest.approx(2 * left_out)
    for sections in (
        {"trainer": {"share_prompts": True}}, {"trainer": {"recompute": "full"}}, {"parallel": {"tensor": 2}}, {"parallel": {"data": 2, "zero": 3}},
        {"rollout": {"prompts_per_step": PROMPTS, "max_tokens": COMPLETION, "engine": {"kv_cache_dtype": "int8"}}},
        # Of micro-batches of one sequence nothing is alike, of groups of one little.
        {"trainer": {"micro_batch_tokens": PROMPT + COMPLETION}},
    ):
        once, every = updates(**sections)
        assert once == every, sections
