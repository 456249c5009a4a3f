"""A folder of every model family is trained by reinforcement learning, and the command generates with the result."""

from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.model import NewModelConfig
from tandem.jobs.start import train
from tandem.layout.shapes import CHOICE_BIAS
from tandem.model.create_model import create_model
from tandem.model.family import all_families
from tandem.model.huggingface.model_folder import read_shapes, read_tensors

STEPS = 10


def early_letters(completions: list[str], **kwargs: object) -> list[float]:
    """A reward that differs between the answers of an untrained model."""
    return [sum(text.count(letter) for letter in "01234") / 8 for text in completions]


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(all_families()))
def test_grpo_trains_a_folder_of_the_family_for_ten_steps_and_generate_reads_the_result(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"num_experts": 4} if all_families()[family].experts else {}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    folder = tmp_path / "model"
    create_model(NewModelConfig(family, max_position_embeddings=64, **sizes, **experts), 0, folder)
    recipe = {
        "model": {"path": str(folder)}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "rollout": {"prompts_per_step": 4, "max_tokens": 8}, "algorithm": {"name": "grpo", "group_size": 4, "kl_coef": 0.01, "kl_estimator": "k3"},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": STEPS, "directory": str(tmp_path / "runs")},
    }  # fmt: skip
    result = train(recipe, rewards=[early_letters])
    assert result.steps == STEPS
    trained = Path(result.model)
    assert read_shapes(trained) == read_shapes(folder)
    before, after = dict(read_tensors(folder)), dict(read_tensors(trained))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(tensor) for name, tensor in after.items())
    assert all(before[name].equal(tensor) for name, tensor in after.items() if name.endswith(CHOICE_BIAS))
    assert main(["generate", str(trained), "--prompt", "12", "--max-tokens", "4", "--temperature", "0"]) in (0, None)
    assert capsys.readouterr().out
