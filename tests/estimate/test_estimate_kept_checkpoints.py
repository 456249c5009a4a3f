"""The predicted bytes of keepers against a keeper that holds what it may."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.recipe import Recipe, load_config
from tandem.estimate.kept_checkpoints import ARRIVING_BYTES, KEEPER_BYTES, KEPT, keeper_bytes, keepers_bytes
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.jobs.pod_plan import kept_by_joined, kept_here, plan_of
from tandem.layout.published_models import PUBLISHED_MODELS
from tandem.runtime.rpc.credentials import new_credential
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.types import RunError

MIB = 2**20


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """Returns the resident bytes of a process, or the most that it has had (``VmHWM``)."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def test_a_keeper_with_two_checkpoints_and_one_that_arrives_takes_what_is_predicted(tmp_path: Path) -> None:
    credential = new_credential()
    process, size = KeeperProcess("a", tmp_path, credential), 24 * MIB
    try:
        keepers = Keepers.of({"keepers": [process.start()], "credential": credential, "nodes": ["a"]}, 0)
        assert process._worker is not None
        pid = process._worker.pid
        assert 0.8 * KEEPER_BYTES <= resident_bytes(pid) <= 1.3 * KEEPER_BYTES
        content = memoryview(b"\x01" * size)
        for step in range(KEPT + 12):
            keepers.put(step, {"part": content})
            keepers.commit(step, {MARKER: b"whole"})
        largest, now = resident_bytes(pid, "VmHWM"), resident_bytes(pid)
        assert 0.85 * keeper_bytes(size) <= largest <= 1.15 * keeper_bytes(size), (largest / MIB, keeper_bytes(size) / MIB)
        assert now <= 1.3 * KEEPER_BYTES + KEPT * size, (now / MIB, "what arrived before is not kept beside the checkpoints")
    finally:
        process.close()


def test_the_second_copies_double_what_keepers_of_several_nodes_hold() -> None:
    size, held = 1000 * MIB, KEPT + 1
    assert keepers_bytes(size, 1, 2) == KEEPER_BYTES + held * size + 2 * ARRIVING_BYTES
    assert keepers_bytes(size, 4, 4) == 4 * KEEPER_BYTES + 2 * held * size + 4 * 2 * ARRIVING_BYTES
    assert keeper_bytes(MIB, 8) == KEEPER_BYTES + (held + 1) * MIB


def test_a_recipe_with_checkpoints_in_memory_is_refused_where_only_the_rest_of_the_run_fits() -> None:
    shapes = replace(PUBLISHED_MODELS["qwen3-0.6b"].shapes, num_hidden_layers=2, vocab_size=8192)
    tiny = Path(__file__).parents[1] / "pod" / "tiny.yaml"

    def recipe(*settings: str) -> Recipe:
        loaded = load_config(str(tiny), ["--pods.max_count=2", "--pods.credential_file=f", "--coordination.store=etcd", "--run.name=r", *settings])
        assert isinstance(loaded, Recipe)
        return loaded

    checkpoint = checkpoint_bytes(shapes, recipe().trainer)
    assert kept_here(recipe(), shapes) == kept_by_joined(recipe(), shapes) == 0
    alone = recipe("--checkpoint.memory_every_steps=1")
    assert kept_here(alone, shapes) == kept_by_joined(alone, shapes) == keeper_bytes(checkpoint)
    half = recipe("--checkpoint.memory_every_steps=1", "--parallel.data=2", "--pods.trainer_count=2")
    assert kept_here(half, shapes) == keeper_bytes(checkpoint, 2), "the rank here, and that of the pod"
    without = plan_of(recipe("--residents.plan=keep"), shapes, 64)
    needs = without.host.largest_phase / 2**30
    kept = kept_here(alone, shapes) / 2**30
    short = recipe("--residents.plan=keep", "--checkpoint.memory_every_steps=1", f"--machine.memory_gib={needs + kept / 2}")
    with pytest.raises(RunError, match=f"this run needs {needs + kept:.2f} GiB at its worst moment"):
        plan_of(short, shapes, 64)
    roomy = recipe("--residents.plan=keep", "--checkpoint.memory_every_steps=1", f"--machine.memory_gib={needs + kept + 0.1}")
    assert plan_of(roomy, shapes, 64).host.largest_phase == without.host.largest_phase + kept_here(alone, shapes)
