"""A pod whose engine stores keys and values in 8 or 4 bits: the trainer rounds them in the same way."""

from pathlib import Path

import pytest
from pod_runs import PodRun


@pytest.mark.full
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4"])
def test_rollout_and_trainer_agree_bit_for_bit_over_a_cache_of_codes(undisturbed: PodRun, tmp_path: Path, name: str) -> None:
    run = PodRun(tmp_path)
    done = run.train(f"--rollout.engine.kv_cache_dtype={name}", "--run.max_steps=3")
    assert done.returncode == 0, done.stderr
    rows, others = run.rows(), undisturbed.rows()
    assert len(rows) == 3
    assert [row["mismatch_kl"] for row in rows] == [0.0] * 3
    # The samples differ from those with an unrounded cache, so the cache was rounded.
    assert rows[0]["actor/grad_norm"] != others[0]["actor/grad_norm"]
