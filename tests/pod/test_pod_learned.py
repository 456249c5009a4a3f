"""When a step must have changed the actor's weights, so that an update with the digest of the one before is an error."""

from types import SimpleNamespace

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.pod.policy_step import has_learned


@pytest.mark.parametrize(
    "dtype, warmup, step, updated, norm, rate, learned",
    [
        ("float32", 10, 0, True, 1.0, 1e-7, True),
        ("bfloat16", 10, 9, True, 1.0, 1e-7, False),
        ("bfloat16", 10, 10, True, 1.0, 3e-6, True),
        ("float32", 0, 3, True, 0.0, 1e-3, False),
        ("float32", 0, 3, True, 1.0, 0.0, False),
        ("float32", 0, 3, False, 1.0, 1e-3, False),
    ],
)
def test_a_step_that_must_have_changed_the_weights(dtype: str, warmup: int, step: int, updated: bool, norm: float, rate: float, learned: bool) -> None:
    result = SimpleNamespace(updated=updated, metrics={"actor/grad_norm": norm, "actor/lr": rate})
    assert has_learned(result, TrainerConfig(dtype=dtype, warmup_steps=warmup), step) is learned  # type: ignore[arg-type]


def test_a_step_in_bf16_at_3e_6_changes_a_few_percent_of_the_weights_and_one_of_a_warm_up_may_change_none() -> None:
    # torch's AdamW, whose step is the rate times the sign of the first gradient, on weights as models have them.
    def changed(count: int, rate: float) -> float:
        generator = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter((0.02 * torch.randn(count, generator=generator)).bfloat16())
        before = weights.detach().clone()
        weights.grad = torch.randn(count, generator=generator).bfloat16()
        torch.optim.AdamW([weights], lr=rate, weight_decay=0.0).step()
        return float((weights.detach() != before).float().mean())

    assert 0.005 < changed(2**20, 3e-6) < 0.1
    assert changed(2**14, 1e-10) == 0.0
