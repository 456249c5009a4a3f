"""The calls of one rank of a run on data. Started by ``supervise``, which holds the run's lock."""

from collections.abc import Mapping
from pathlib import Path

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.jobs.data_run.rank_events import ProgressCallback
from tandem.jobs.data_run.start_data import opened_run, train_on
from tandem.jobs.replay.steps_again import run_again
from tandem.runtime.callback import Callback
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.rpc.pod_tls import tls_of
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.tiers.disks_tier import Node
from tandem.trainer.corruption.finding import SilentCorruption
from tandem.trainer.rank_process import Rank, start

CALLS = ("train", "replay")


class DataRank:
    """``train`` runs the job to its end; ``replay`` repeats its steps up to a recorded one. Every rank answers the same call."""

    def __init__(self, recipe: PretrainRecipe, rank: Rank) -> None:
        self.recipe, self.rank = recipe, rank

    def train(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Trains from the newest whole checkpoint to the end. Rank 0 replies with the ``result``; a run that was asked to stop with ``stopped``,
        and one whose ranks computed different bits with ``corruption``. ``memory``: the keepers of one machine; ``tiers``: those of several, and their
        disks, as of ``NearTiers.describe``."""
        tiers = meta.get("tiers") or {"memory": meta.get("memory"), "local": None, "recorded": None}
        tls, local = tls_of(self.recipe.pods), tiers["local"]
        memory = None if tiers["memory"] is None else Keepers.of(tiers["memory"], self.rank.ranks.world.rank, tls)
        node = None if local is None else Node(local["node"], local["credential"], tls)
        try:
            result = train_on(
                self.rank, self.recipe, self._callback(progress), resumed=bool(meta["resumed"]), memory=memory, node=node, recorded=tiers["recorded"],
                watches_health=self.recipe.pods.trainer_count == 1,
            )
        except KeyboardInterrupt:
            return {"stopped": True}, {}
        except SilentCorruption as corruption:
            # Every rank raises it.
            return {"corruption": corruption.finding.to_json()}, {}
        # No rank ends while another one is still in a collective.
        self.rank.ranks.world.barrier("the end")
        return {"result": None if result is None else result.to_json()}, {}

    def replay(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Repeats the steps from the newest checkpoint at or before ``step`` to ``step``, and writes their rows."""
        step = int(meta["step"])
        with opened_run(self.rank, self.recipe, self._callback(progress), at_most=step) as run:
            run_again(run, step)
        self.rank.ranks.world.barrier("the end")
        return {}, {}

    def _callback(self, progress: Progress) -> Callback:
        return ProgressCallback(progress) if self.rank.ranks.is_first else Callback()


def make(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """Returns the calls of the rank of ``settings``. Its records have the fault points of its phases, so its calls have none."""
    recipe = load_config(Path(settings.directory) / "config.yaml")
    assert isinstance(recipe, PretrainRecipe)
    parallel = recipe.parallel
    rank = DataRank(recipe, start(settings, bool(parallel.deterministic), parallel.sequence_parallel))
    return {name: getattr(rank, name) for name in CALLS}, no_fault
