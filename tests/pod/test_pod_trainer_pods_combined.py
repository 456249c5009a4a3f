"""Two trainer pods with other parts of a recipe: the bits of one pod."""

from pathlib import Path

import pytest
from trainer_pod_runs import assert_same_bits

COMBINED = {
    "adapter": "--parallel.data=2 --trainer.lora.rank=4",
    "one step off": "--parallel.data=2 --rollout.max_staleness=1",
    "engines end": "--parallel.data=2 --residents.plan=terminate",
}


@pytest.mark.full
@pytest.mark.parametrize("settings", [pytest.param(settings, id=name) for name, settings in COMBINED.items()])
def test_two_trainer_pods_with_other_parts_have_the_bits_of_one(settings: str, tmp_path: Path) -> None:
    assert_same_bits(settings, tmp_path)
