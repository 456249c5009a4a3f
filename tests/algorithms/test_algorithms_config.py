"""The sections of trainer, algorithm and warm-up refuse what cannot train, on one line that names the key."""

import pytest

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.sft import SFTConfig
from tandem.config.trainer import TrainerConfig
from tandem.types import UserError


@pytest.mark.parametrize("section", [AlgorithmConfig(), TrainerConfig(), SFTConfig()])
def test_the_defaults_can_train(section):
    section.check()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (AlgorithmConfig(group_size=1), "'algorithm.group_size' is 1"),
        (AlgorithmConfig(clip_ratio_low=0), "'algorithm.clip_ratio_low' is 0"),
        (AlgorithmConfig(clip_ratio_high=-1), "'algorithm.clip_ratio_high' is -1"),
        (AlgorithmConfig(dual_clip=1.1), "'algorithm.dual_clip' is 1.1"),
        (AlgorithmConfig(kl_coef=-0.1), "'algorithm.kl_coef' is -0.1"),
        (AlgorithmConfig(tis_cap=0.5), "'algorithm.tis_cap' is 0.5"),
        (AlgorithmConfig(minibatches=0), "'algorithm.minibatches' is 0"),
        (TrainerConfig(learning_rate=0), "'trainer.learning_rate' is 0"),
        (TrainerConfig(beta2=1.0), "'trainer.beta2' is 1.0"),
        (TrainerConfig(max_grad_norm=float("inf")), "'trainer.max_grad_norm' is inf"),
        (TrainerConfig(schedule="linear"), "'trainer.total_steps' is 0"),
        (TrainerConfig(schedule="cosine", warmup_steps=5, total_steps=5), "'trainer.total_steps' is 5"),
        (TrainerConfig(micro_batch_tokens=0), "'trainer.micro_batch_tokens' is 0"),
        (SFTConfig(steps=0), "'sft.steps' is 0"),
        (SFTConfig(corrupted_share=1.0), "'sft.corrupted_share' is 1.0"),
        (SFTConfig(steps=5, warmup_steps=5), "'sft.warmup_steps' is 5"),
    ],
)
def test_a_value_that_cannot_train_is_named(section, named):
    with pytest.raises(UserError) as error:
        section.check()
    assert str(error.value).startswith(named)
    assert "\n" not in str(error.value)
