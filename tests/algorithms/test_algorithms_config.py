"""The sections trainer, algorithm and sft refuse invalid values in one line that names the key."""

import pytest

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.model import ModelConfig
from tandem.config.pretrain import DataConfig, DatasetConfig, PretrainConfig, PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.config.run import RunConfig
from tandem.config.sft import SFTConfig
from tandem.config.task import TaskConfig
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


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (TrainerConfig(schedule="cosine", warmup_steps=5), "'run.max_steps' is 5"),
        (TrainerConfig(schedule="wsd", warmup_steps=2), "'trainer.decay_steps' is 0"),
        (TrainerConfig(schedule="wsd", warmup_steps=2, decay_steps=4), "'trainer.decay_steps' is 4"),
    ],
)
def test_a_schedule_that_does_not_fit_in_the_run_is_named(trainer, named):
    run = RunConfig(max_steps=5)
    for recipe in (
        Recipe(ModelConfig(path="model"), TaskConfig("sort"), run=run, trainer=trainer),
        PretrainRecipe(PretrainConfig("pretrain"), ModelConfig(path="model"), DataConfig((DatasetConfig("data"),)), run=run, trainer=trainer),
    ):
        with pytest.raises(UserError) as error:
            recipe.check()
        assert str(error.value).startswith(named) and "\n" not in str(error.value)
