"""The trainer of a run on data over several machines: the run's own ranks, and pods that join with the others. Imports no torch.

It is the trainer of several pods of reinforcement learning (``trainer_pods``) without a rollout: the pods join, are prepared, judged and replaced by the same
code, and have the calls of another module than ``trainer_worker``.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import yaml

from tandem.config.load import to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.layout.placement import mesh_of, ranks_of_pods
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.joined_trainers import JoinedTrainers
from tandem.pod.joining import FOLDER_PROOF, Joining
from tandem.pod.leadership import Fence, led_revision
from tandem.pod.member_watch import MemberWatch
from tandem.pod.own_ranks import OwnRanks
from tandem.pod.pod_threads import rank_threads
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.start import check_joining, cluster_nodes
from tandem.pod.trainer_pods import TrainerPod, TrainerPods
from tandem.runtime.coordination.membership import members
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.rpc.credentials import read_credential, write_credential
from tandem.runtime.rpc.pod_tls import tls_of


@contextlib.contextmanager
def data_trainer(
    recipe: PretrainRecipe, directory: Path, own: OwnRanks, fence: Fence, on_poll: Callable[[], None]
) -> Iterator[TrainerPods]:
    """Yields the trainer of ``recipe``, of which ``own`` are the ranks of this machine; the calls of all ranks take any time. At the end of the block every
    pod is told that the run needs it no longer. ``on_poll`` is called again and again while this waits for pods."""
    check_joining(recipe)
    pods, address, count = recipe.pods, store_address(recipe.coordination, directory), recipe.pods.trainer_count
    folder, proof = directory / "pod", secrets.token_hex(16)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)
    (folder / FOLDER_PROOF).write_text(proof, encoding="ascii")
    credential = read_credential(Path(pods.credential_file))
    write_credential(folder / "credential", credential)
    joining = Joining(
        yaml.safe_dump(to_mapping(recipe), sort_keys=False, allow_unicode=True), credential, 1,
        pods.max_count - pods.count, pods.count, partial(led_revision, fence), float("inf"),
        pods.heartbeat_timeout_s, str(directory.absolute()), proof, tls=tls_of(pods),
        keeps_checkpoints=bool(recipe.checkpoint.memory_every_steps), nodes=cluster_nodes(recipe, directory), target=own.settings.target,
    )  # fmt: skip
    joined = JoinedTrainers(count - 1, 1, joining, lambda: open_store(address), pods.join_timeout_s, on_poll)
    shares = ranks_of_pods(mesh_of(recipe.parallel), count)
    first = TrainerPod(0, own, shares[0], pods.host)
    trainer = TrainerPods([first], directory, rank_threads(recipe), shares, joined, own={"device": own.settings.device})
    watch = MemberWatch(lambda: open_store(address), joining.all_lives)
    try:
        yield trainer
    finally:
        watch.close()
        trainer.close()
        for pod in joining.all_lives():
            pod.channel.close()
        joining.nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def release_leaving(trainer: TrainerPods) -> list[RolloutPod]:
    """Releases the pods that leave by themselves, and returns them."""
    joined = trainer.joined
    assert joined is not None
    with contextlib.closing(joined.open_store()) as store:
        present = {(member.name, member.revision) for member in members(store)}
    leaving = [pod for pod in joined.chosen if (pod.name, pod.revision) not in present]
    for pod in leaving:
        assert isinstance(pod.channel, JoinedChannel)
        pod.channel.close()
        joined.joining.forget(pod, "left")
    return leaving
