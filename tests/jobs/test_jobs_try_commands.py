"""The commands that a run prints at its end compute the model as the run did."""

import json
from pathlib import Path

import pytest

from tandem.config.implementation import OWN
from tandem.jobs.try_commands import data_commands, drafting_commands, task_commands

SHORT, LONGEST = 16, 64
PHI = {
    "model_type": "phi3", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "original_max_position_embeddings": SHORT, "tie_word_embeddings": True,
}  # fmt: skip
LONGROPE = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}}


@pytest.mark.parametrize(
    ("keys", "context", "flags"),
    [(LONGROPE, SHORT, ""), (LONGROPE, SHORT + 1, " --max-model-len 17"), (LONGROPE, LONGEST + 1, " --max-model-len 64"), ({}, SHORT + 1, "")],
)
def test_a_command_names_the_context_where_the_rotary_frequencies_depend_on_it(keys: dict[str, object], context: int, flags: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PHI, **keys}))
    assert f" generate {tmp_path}{flags} --prompt " in data_commands(tmp_path, None, OWN, context)[0]
    assert f" generate {tmp_path}{flags} --prompt " in task_commands(tmp_path, "12", OWN, context)[0]
    assert f" generate {tmp_path}{flags} --speculative-config " in drafting_commands(tmp_path / "head", tmp_path, context)[0]
