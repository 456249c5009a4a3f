"""Jobs of a real Slurm are the runs of this machine, bit for bit, and end as their user or Slurm wants it."""

import json
import re
from collections.abc import Callable

from launched_runs import TINY, LaunchedRuns

Here = Callable[..., str]


def test_a_job_of_slurm_ends_with_the_weights_of_the_run_on_this_machine(near_slurm: LaunchedRuns, here: Here) -> None:
    said = here("train", TINY, "--on", "slurm", "--run.name=job", "--slurm.partition=small", "--slurm.cpus_per_task=1")
    assert re.match(r"submitted job \d+: run runs/job\n", said)
    here("train", TINY, "--on", "local", "--run.name=local")
    followed = here("logs", "runs/job", "--follow")
    status = json.loads(here("status", "runs/job", "--json"))
    assert (status["state"], status["steps"], status["checkpoint"], status["launcher"]) == ("finished", 4, 4, "slurm"), (status, followed)
    assert followed == here("logs", "runs/job") == near_slurm.output("job") and "step 3: loss" in followed
    assert near_slurm.model("job") == near_slurm.model("local")
    assert here("status", "runs/local").startswith("runs/local: finished\n4 of at most 4 steps, loss ")
    # Nothing is repeated, and no job is made of it.
    assert "has finished" in here("resume", "runs/job")


def test_what_slurm_could_not_run_is_refused_before_anything_is_made(near_slurm: LaunchedRuns, here: Here) -> None:
    def refused(*settings: str) -> str:
        return here("train", TINY, "--on", "slurm", "--run.name=refused", *settings)

    assert refused("--slurm.partition=mian") == "'slurm.partition' is 'mian', which this cluster does not have; did you mean 'main'?"
    assert refused("--slurm.partition=closed").startswith("partition 'closed' is down;")
    assert refused("--slurm.nodes=2").startswith("'slurm.nodes' is 2 and 'parallel.data' 1, which 2 nodes with ranks do not divide")
    assert refused("--slurm.nodelist=n1,n1") == "'slurm.nodelist' is 'n1,n1', which names 'n1' twice; name each node once"
    assert refused("--slurm.nodelist=n7").startswith("'slurm.nodelist' has 'n7', which this cluster does not have;")
    assert refused("--slurm.nodelist=n[1-2]").startswith("'slurm.nodelist' has 2 nodes, and 'slurm.nodes' is 1;")
    assert refused("--slurm.gpus_per_node=8").startswith("'slurm.gpus_per_node' is '8', and 0 nodes of this cluster have 8 GPUs (the most is 0), where 1")
    assert refused("--slurm.gpus_per_node=many").startswith("'slurm.gpus_per_node' is 'many'; write a number")
    assert refused("--slurm.mem=900G") == "Slurm refused: allocation failure: Requested node configuration is not available"
    assert refused("--slurm.options=[--gibberish=1]").startswith("Slurm refused: sbatch: unrecognized option '--gibberish=1'")
    assert refused("--inline").startswith("--inline is one process on this machine")
    assert not (near_slurm.folder / "runs").exists()
