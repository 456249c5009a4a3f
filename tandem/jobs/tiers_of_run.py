"""The tiers of checkpoints before a run's folder, for a run that begins or goes on with pods. Imports no torch."""

from collections.abc import Callable, Collection
from pathlib import Path

from tandem.config.recipe import AnyRecipe
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.pod.joining import Joining
from tandem.pod.near_tiers import NearTiers, keeper_of
from tandem.pod.start import shared_store
from tandem.report.run_facts import NODE_KEY
from tandem.runtime.coordination.open import open_store
from tandem.runtime.records.checkpoint_tiers import read_tiers
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import kept_name, local_folder
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.rpc.credentials import new_credential, read_credential
from tandem.trainer.checkpoint.memory.keeper_process import LOOPBACK
from tandem.trainer.checkpoint.memory.launched_keepers import launched_keepers


def near_tiers(
    recipe: AnyRecipe, directory: Path, journal: Journal, metrics: MetricsFile, joining: Joining | None, say: Callable[[str], None]
) -> NearTiers:
    """Returns the tiers of the run in ``directory``, whose pods are ``joining`` (``None``: none may). Their keepers show the secret of the pods. Checkpoints of
    steps whose rows the folder does not have are left alone: a machine that lost its power took them with it."""
    shared, checkpoint = directory / "pod" / "credential", recipe.checkpoint
    credential = read_credential(shared) if shared.exists() else new_credential()
    address = shared_store(recipe, directory)
    newest = metrics.last_row()
    return NearTiers(
        keeper_of(recipe, directory, credential), recipe.parallel.world, credential, local_folder(checkpoint.local_directory, directory, journal),
        checkpoint.upload, None if joining is None else lambda: open_store(address),
        tuple if joining is None else lambda: [pod.name for pod in joining.all_lives() if pod.channel.is_running], say,
        host=recipe.pods.host if recipe.pods.may_join else LOOPBACK, is_spread=recipe.pods.trainer_count > recipe.pods.count,
        of=kept_name(directory, journal) if checkpoint.memory_every_steps else "", recorded=0 if newest is None else int(newest["step"]) + 1,
        expected=kept_elsewhere(directory, journal) if checkpoint.memory_every_steps and joining is not None else {},
        launched=tuple if joining is None else lambda: launched_keepers(directory),
    )  # fmt: skip


def kept_elsewhere(directory: Path, journal: Journal) -> dict[int, Collection[str]]:
    """Returns, by rank, the keepers on other machines than that of the last controller that had its files of the newest checkpoint; none if some rank has
    none there, and none if the folder has one that is as new."""
    memory = next((state for state in read_tiers(journal) if state.tier == "memory"), None)
    if memory is None or memory.step <= max(steps_on_disk(directory), default=0):
        return {}
    home = journal.get(NODE_KEY)
    of_rank: dict[int, Collection[str]] = {
        rank: {name for name, ranks in memory.where.items() if rank in ranks and name != home} for ranks in memory.where.values() for rank in ranks
    }
    return of_rank if all(of_rank.values()) else {}
