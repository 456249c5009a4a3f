"""Context parallelism: ranks that divide the tokens of a batch train like one process."""

from dataclasses import replace

import pytest
import torch
from model_ranks import (
    COHERE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GPT_OSS,
    GRANITE,
    OLMO2,
    QWEN3,
    QWEN3_NEXT,
    SMOLLM3,
    WINDOWED,
    Case,
    Trained,
    by_one_process,
    check,
    train,
)
from ranks import RankContext, Ranks

from tandem.layout.linear_attention import LinearAttention
from tandem.layout.mesh import MeshShape

pytestmark = pytest.mark.usefixtures("one_thread")
THREE_HEADS = replace(QWEN3, num_attention_heads=3, num_key_value_heads=1)
THREE_LATENT = replace(DEEPSEEK_V2, num_attention_heads=3, num_key_value_heads=3)
SIX_HEADS = replace(QWEN3, num_attention_heads=6, num_key_value_heads=2)
OTHERS = [pytest.param(shapes, marks=pytest.mark.full) for shapes in (QWEN3_NEXT, DEEPSEEK_V3, THREE_LATENT)]
LONG, SHORT, MIXED = (97,), (3, 2, 5, 2, 4, 3, 6, 2, 3, 5, 2), (9, 2, 17, 5, 30, 3, 8)


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


@pytest.mark.parametrize(
    ("shapes", "lengths"),
    [
        pytest.param(QWEN3, LONG, id="heads, long"),
        pytest.param(THREE_HEADS, LONG, id="keys, long"),
        pytest.param(WINDOWED, SHORT, id="window, short"),
        pytest.param(THREE_HEADS, SHORT, id="keys, short"),
        *(
            pytest.param(shapes, lengths, id=f"{name}, {kind}", marks=pytest.mark.full)
            for name, shapes, kind, lengths in (
                ("heads", QWEN3, "short", SHORT), ("window", WINDOWED, "long", LONG), ("heads", QWEN3, "mixed", MIXED),
                ("window", WINDOWED, "mixed", MIXED), ("keys", THREE_HEADS, "mixed", MIXED),
                ("norms of all heads", OLMO2, "mixed", MIXED), ("no rotation", SMOLLM3, "mixed", MIXED), ("multipliers", GRANITE, "mixed", MIXED),
                ("latent", DEEPSEEK_V3, "mixed", MIXED), ("latent and gathered keys", THREE_LATENT, "mixed", MIXED),
                ("caps", GEMMA, "mixed", MIXED), ("caps and gathered keys", replace(GEMMA, num_attention_heads=3, num_key_value_heads=1), "mixed", MIXED),
                ("sinks", GPT_OSS, "mixed", MIXED), ("sinks and gathered keys", replace(GPT_OSS, num_attention_heads=3, num_key_value_heads=1), "mixed", MIXED),
                ("side by side", COHERE, "mixed", MIXED), ("linear", QWEN3_NEXT, "mixed", MIXED),
            )
        ),
    ],
)  # fmt: skip
def test_two_context_ranks_train_what_one_process_trains(ranks: Ranks, shapes, lengths) -> None:
    """Three heads cannot be divided: keys and values are gathered."""
    case = Case(shapes, lengths=lengths)
    check(ranks.run(MeshShape(context=2), trained, case), by_one_process(case))


@pytest.mark.full
@pytest.mark.parametrize(("shapes", "count"), [(QWEN3, 4), (SIX_HEADS, 3)], ids=["shared heads", "heads of two groups"])
def test_more_context_ranks_than_key_value_heads(ranks: Ranks, shapes, count) -> None:
    case = Case(shapes)
    check(ranks.run(MeshShape(context=count), trained, case), by_one_process(case))


@pytest.mark.parametrize("shapes", [QWEN3, THREE_HEADS, OTHERS[0]], ids=["heads", "keys", "linear"])
def test_a_context_rank_without_a_token_takes_part(ranks: Ranks, shapes) -> None:
    case = Case(shapes, lengths=(2,), masked=3)
    check(ranks.run(MeshShape(context=2), trained, case), by_one_process(case))


@pytest.mark.parametrize("shapes", [QWEN3, THREE_HEADS, *OTHERS], ids=["heads", "keys", "linear", "latent, heads", "latent, keys"])
def test_context_ranks_have_the_bits_of_one_process(ranks: Ranks, shapes) -> None:
    case = Case(shapes, "float32", "cpu", lengths=LONG, steps=1)
    found, wanted = ranks.run(MeshShape(context=2), trained, case), by_one_process(case)
    check(found, wanted)
    assert all(torch.equal(rank.logits[0], wanted.logits[0]) and torch.equal(rank.logprobs[0], wanted.logprobs[0]) for rank in found)


@pytest.mark.full
@pytest.mark.parametrize("shapes", [QWEN3, replace(QWEN3_NEXT, linear_attention=LinearAttention((0,), 4, 8, 12, 10, 4))], ids=["softmax", "linear"])
def test_context_ranks_times_tensor_ranks(ranks: Ranks, shapes) -> None:
    case = Case(shapes, sequence=True)
    check(ranks.run(MeshShape(context=2, tensor=2), trained, case), by_one_process(case))


@pytest.mark.full
def test_data_times_context_times_tensor(ranks: Ranks) -> None:
    case = Case(QWEN3, sequence=True)
    check(ranks.run(MeshShape(data=2, context=2, tensor=2), trained, case), by_one_process(case))
