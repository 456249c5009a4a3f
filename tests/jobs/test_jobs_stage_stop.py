"""A request to stop that comes when the stage of fine-tuning has taken its last step stops the run that it belongs to."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.config.model import ModelConfig
from tandem.config.pretrain import PretrainConfig, PretrainRecipe
from tandem.jobs.data_run import supervise as supervised
from tandem.runtime.callback import Callback


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_stage", [True, False])
def test_a_signal_after_the_last_step_ends_the_command_if_a_stage_follows(
    is_stage: bool, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_on_ranks(*_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        return {"result": {}}

    monkeypatch.setattr(supervised, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(supervised.RunResult, "from_json", classmethod(lambda cls, _: "ended"))
    recipe = PretrainRecipe(algorithm=PretrainConfig("sft"), model=ModelConfig(path="model"))
    if not is_stage:
        result: object = supervised.supervise(recipe, tmp_path, Callback())
        assert result == "ended"
        return
    with pytest.raises(KeyboardInterrupt):
        supervised.supervise(recipe, tmp_path, Callback(), is_stage=True)
