"""The predicted work of a step of reinforcement learning: what the trainer packs, and closed forms."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.config.load import build
from tandem.config.recipe import Recipe
from tandem.estimate.draft_work import draft_passes, draft_work
from tandem.estimate.rl_work import RLModels, RLWork, packed_group, rl_work
from tandem.estimate.time import Product, Work
from tandem.estimate.training.layout import DraftTraining
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.trainer.packing import packed_tokens
from tandem.types import TrainSequence

ACTOR = ModelShapes("llama", 101, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
NORMS, EMBEDDING = 7 * 32, 101 * 32
MATRICES = parameter_count(ACTOR) - NORMS - 2 * EMBEDDING
BEHIND_ATTENTION = 32 * 32 + 3 * 48 * 32
"""Of one layer."""
PROMPT, COMPLETION, GROUP, PROMPTS = 20, 12, 4, 3


def flops(works: tuple[Work, ...]) -> float:
    return sum(times * product.flops for work in works for product, times in work.products.items())


def attention(works: tuple[Work, ...]) -> float:
    return sum(work.attention_flops for work in works)


def work(models: RLModels = RLModels(ACTOR), **sections: Any) -> RLWork:  # noqa: B008
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": {"prompts_per_step": PROMPTS, "max_tokens": COMPLETION}}
    data |= {"algorithm": {"group_size": GROUP}, **sections}
    return rl_work(build(Recipe, data), models, PROMPT, COMPLETION)


def passes_of(works: RLWork) -> tuple[Work, ...]:
    return (*works.inference, *works.training)


def group() -> list[TrainSequence]:
    """A group as the trainer has it: the network reads all tokens but the last."""
    return [
        TrainSequence(str(index), (*range(PROMPT), *(30 + index,) * COMPLETION, 0), PROMPT, (0.0,) * PROMPT + (1.0,) * (COMPLETION + 1))
        for index in range(GROUP)
    ]  # fmt: skip


def test_a_group_has_the_tokens_that_the_trainer_packs() -> None:
    for shared in (False, True):
        assert packed_group(PROMPT, COMPLETION, GROUP, shared).tokens == packed_tokens(group(), shared)
    # Each token attends to those before it; half of the context is their mean.
    attended = [*range(PROMPT)] + GROUP * [*range(PROMPT, PROMPT + COMPLETION)]
    shared = packed_group(PROMPT, COMPLETION, GROUP, True)
    assert shared.tokens * shared.context / 2 == pytest.approx(sum(place + 0.5 for place in attended))
    assert packed_group(PROMPT, COMPLETION, 1, True) == packed_group(PROMPT, COMPLETION, 1, False)


def test_a_shared_prompt_is_computed_once_in_every_pass_of_training() -> None:
    for kl_coef in (0.0, 0.1):
        for shared, tokens in ((False, GROUP * (PROMPT + COMPLETION)), (True, PROMPT + GROUP * COMPLETION)):
            predicted = work(algorithm={"group_size": GROUP, "kl_coef": kl_coef}, trainer={"share_prompts": shared})
            assert flops(predicted.training) == pytest.approx(3 * PROMPTS * tokens * 2 * (MATRICES + EMBEDDING))
            once = tokens * (MATRICES - BEHIND_ATTENTION) + GROUP * COMPLETION * (BEHIND_ATTENTION + EMBEDDING)
            assert flops(predicted.inference) == pytest.approx((kl_coef > 0) * PROMPTS * 2 * once)
    shared, plain = (work(trainer={"share_prompts": each}) for each in (True, False))
    assert attention(shared.training) < attention(plain.training) and shared.generation == plain.generation


def test_every_round_of_dynamic_sampling_is_generated_and_scored_and_one_batch_is_trained_on() -> None:
    one, filters = work(), {"group_size": GROUP, "filter_groups": {"max_num_gen_batches": 5, "gen_batch_size": 2 * PROMPTS}}
    several = work(algorithm=filters)
    assert len(several.generation) == 5 and flops(several.generation) == pytest.approx(5 * 2 * flops(one.generation))
    assert several.training == one.training
    scorer = replace(ACTOR, value_head="sequence", language_head=False)
    models, reward_model = RLModels(ACTOR, reward_model=scorer), {"path": "scorer"}
    for algorithm, prompts in (({"group_size": GROUP}, PROMPTS), (filters, 5 * 2 * PROMPTS)):
        scored = work(models, algorithm=algorithm, reward_model=reward_model)
        # Every sample with its prompt, through the layers and no head; behind the last attention the token that has the score.
        length = PROMPT + COMPLETION
        assert flops(passes_of(scored)) - flops(one.training) == pytest.approx(
            prompts * GROUP * 2 * (length * MATRICES - (length - 1) * BEHIND_ATTENTION)
        )


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


def test_a_pass_without_gradient_leaves_out_what_only_tokens_that_predict_nothing_need_where_a_rank_has_whole_layers() -> None:
    algorithm = {"group_size": GROUP, "kl_coef": 0.1, "old_logprobs": "recompute", "tis_cap": 2.0}
    tokens, predicted = PROMPTS * GROUP * (PROMPT + COMPLETION), PROMPTS * GROUP * COMPLETION
    whole, early = tokens * MATRICES + predicted * EMBEDDING, tokens * (MATRICES - BEHIND_ATTENTION) + predicted * (BEHIND_ATTENTION + EMBEDDING)
    for sections, expected in (({}, early), ({"trainer": {"precision": "fp8"}}, whole), ({"parallel": {"tensor": 2}}, whole)):
        # The reference, and the policy once more beside its update.
        passes = work(algorithm=algorithm, **sections)
        assert flops(passes.inference) == pytest.approx(2 * expected)
        assert flops(passes.training) == pytest.approx(2 * (3 * tokens * (MATRICES + EMBEDDING) + expected))
    # The last layer of a mixture of experts sees every token; the head does not.
    experts = RLModels(replace(ACTOR, experts=ExpertShapes(4, 2, 48)))
    layers = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 48 * 32)
    assert flops(work(experts, algorithm=algorithm).inference) == pytest.approx(2 * (tokens * layers + predicted * EMBEDDING))


def test_a_critic_has_an_inference_pass_and_the_updates_of_the_actor_without_logits() -> None:
    critic = replace(ACTOR, value_head="token", language_head=False)
    ppo = {"name": "ppo", "group_size": GROUP, "minibatches": 2, "epochs": 3}
    alone, beside = work(algorithm={**ppo, "name": "reinforce_plus_plus"}), work(RLModels(ACTOR, critic=critic), algorithm=ppo)
    tokens = PROMPTS * GROUP * (PROMPT + COMPLETION)
    values = tokens * MATRICES - PROMPTS * GROUP * PROMPT * BEHIND_ATTENTION
    assert flops(passes_of(beside)) - flops(alone.training) == pytest.approx(2 * (3 * 3 * tokens * MATRICES + values))
    assert not any(product == Product(product.rows, 101, 32) for product in beside.training[-1].products), "a value head has no logits"
    assert flops(beside.inference) == pytest.approx(2 * values), "its values"
