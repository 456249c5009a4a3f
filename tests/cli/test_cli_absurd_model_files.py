"""Absurd files in the place of those of models, runs and the registry: one line, at once, with bounded memory."""

from pathlib import Path

import pytest
from absurd_files import damaged_cases, defects, places_of_models, special_cases


@pytest.mark.full
def test_every_special_file_in_the_place_of_a_model_ends_the_command_in_one_line(files: Path, tmp_path: Path) -> None:
    assert defects(special_cases(files, tmp_path, places_of_models(files))) == []


@pytest.mark.full
def test_random_changes_of_every_file_of_a_model_end_the_command_in_one_line(files: Path, tmp_path: Path) -> None:
    assert defects(damaged_cases(files, tmp_path, places_of_models(files), 5)) == []
