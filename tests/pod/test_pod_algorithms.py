"""Every algorithm in a pod: rollout and trainer agree bit for bit, a killed trainer changes nothing, and a replayed step is the recorded one."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference, finish

ALGORITHMS = {
    "cispo": ("--algorithm.policy_loss=cispo", "--algorithm.minibatches=2"),
    "mirror descent": ("--algorithm.name=dr_grpo", "--algorithm.policy_loss=mirror_descent", "--algorithm.loss_agg_mode=seq-mean-token-sum"),
    "reinforce++": ("--algorithm.name=reinforce_plus_plus", "--algorithm.kl_in_reward=true", "--algorithm.kl_estimator=k1"),
    "online dpo": ("--algorithm.name=online_dpo", "--algorithm.kl_coef=0", "--algorithm.minibatches=2"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_killed_trainer_changes_nothing_and_a_replayed_step_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    calm, killed = PodRun(tmp_path / "calm"), PodRun(tmp_path / "killed")
    for run, faults in ((calm, ()), (killed, ("--fault", "trainer_worker:after:train:3"))):
        done = run.train(*ALGORITHMS[name], *faults)
        assert done.returncode == 0, done.stdout + done.stderr
    assert difference(killed, calm) == [] and killed.left_behind() == []
    assert [row["mismatch_kl"] for row in calm.rows()] == [0.0] * 6
    assert len({row["actor/grad_norm"] for row in calm.rows()}) == 6, "every step learned"
    again = finish(calm.begin("replay", str(calm.directory), "--step", "5"))
    assert again.returncode == 0, again.stdout + again.stderr
