"""A disk that becomes full while a run trains."""

import contextlib
import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.jobs.start import resume, train
from tandem.runtime.callback import Callback
from tandem.types import RunError

CREATE = {
    "architecture": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


class Fill(Callback):
    """Fills the disk of ``file`` after the first step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def row(self, row: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError), self.file.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


RECIPE = {
    "algorithm": {"name": "sft"}, "model": {"create": CREATE}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
    "data": {"sequence_length": 16, "global_batch_size": 2}, "trainer": {"warmup_steps": 0}, "machine": {"threads": 1}, "checkpoint": {"every_steps": 1000},
}  # fmt: skip


def test_a_file_that_cannot_be_written_for_lack_of_room_ends_the_run_with_the_room_of_its_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tandem.jobs.start._run_job", full)
    line = rf"^no space left on a disk of the run \(free: [\d,]+ MiB of '{tmp_path}/r', .*\); make room, then '.*resume {tmp_path}/r' continues it$"
    with pytest.raises(RunError, match=line):
        train({**RECIPE, "run": {"max_steps": 2, "directory": str(tmp_path), "name": "r"}}, progress=False)


@pytest.mark.full
def test_a_disk_that_becomes_full_is_named_and_the_run_goes_on_when_there_is_room(small_disk: Callable[[str], Path], quiet_root: None) -> None:
    disk = small_disk("16m")
    recipe = {**RECIPE, "run": {"max_steps": 2000, "directory": str(disk), "name": "r"}}
    fill = Fill(disk / "fill")
    line = rf"no space left on a disk of the run \(free: 0 MiB of '{disk}/r'|{disk}/r/\S+ cannot be written .*; make room on its disk and resume$"
    with pytest.raises(RunError, match=line) as caught:
        train(recipe, callbacks=[fill], progress=False)
    assert "\n" not in str(caught.value)
    fill.file.unlink()
    assert resume(disk / "r", overrides=["--run.max_steps=30"], progress=False).steps == 30
