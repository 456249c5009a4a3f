"""Put the channels of a run together: sidecars in processes of their own, in one pod or several, or both inline."""

import secrets
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from tandem.config.coordination import CoordinationConfig
from tandem.config.load import to_mapping
from tandem.config.pods import PodsConfig
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.config.run_paths import with_run_paths
from tandem.layout.placement import mesh_of, ranks_of_pods
from tandem.pod.channel import Channel, InlineChannel, RemoteChannel
from tandem.pod.failures import Role
from tandem.pod.joined_trainers import JoinedTrainers
from tandem.pod.joining import FOLDER_PROOF, Joining
from tandem.pod.leadership import Fence, led_revision
from tandem.pod.nodes import Nodes
from tandem.pod.pod_forks import pod_forks
from tandem.pod.pod_threads import pod_threads, rank_threads
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.rollout_pods import RolloutPods
from tandem.pod.sent_functions import sent_functions
from tandem.pod.trainer_pods import TrainerPod, TrainerPods
from tandem.pod.weights_between_pods import tls_arguments
from tandem.pod.worker import make_worker
from tandem.runtime.coordination.open import cluster_address, open_store, store_address, with_deadline
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.process.waits import WAITS
from tandem.runtime.rpc.credentials import new_credential, read_credential, write_credential
from tandem.runtime.rpc.listener import listen
from tandem.runtime.rpc.pod_tls import tls_of
from tandem.types import UserError

_CORDONS_S = 5.0
"""A run waits so long for the cordons of the cluster, and goes on with those that it read last."""


def longest_episode_s(recipe: Recipe) -> float:
    """Returns the seconds that an episode may last by itself, whatever was measured: an agent may wait for others. 0 without agents."""
    return 0.0 if recipe.rollout.agent is None else recipe.rollout.agent.timeout_s + recipe.watchdog.min_deadline_s


def check_inline(recipe: Recipe, inline: bool) -> None:
    """Raises ``UserError`` if a run that is to be ``inline`` needs processes."""
    if not inline:
        return
    for key, backend in (("trainer.backend", recipe.trainer.backend), ("rollout.backend", recipe.rollout.backend)):
        if backend != "tandem":
            raise UserError(f"--inline is one process and '{key}' is '{backend}', which has an environment of its own; leave --inline out")
    if recipe.pods.are_several:
        count = max(recipe.pods.count, recipe.pods.max_count)
        raise UserError(f"--inline is one process and this run has {count} pods; leave --inline out or set pods.count to 1")
    if recipe.parallel.world > 1:
        raise UserError(f"--inline is one process and this run has {recipe.parallel.world} ranks; leave --inline out or set parallel to 1")


def check_joining(recipe: AnyRecipe) -> None:
    """Raises ``UserError`` where pods that are started elsewhere could not join: for the address of this machine, the secret, certificates or functions."""
    if recipe.pods.may_join:
        # The trainer's shim listens there much later.
        listen(recipe.pods.host, recipe.pods.port).close()
        read_credential(Path(recipe.pods.credential_file))
        tls_of(recipe.pods)
        if isinstance(recipe, Recipe):
            sent_functions(recipe)


def open_channels(recipe: Recipe, directory: Path, inline: bool, faults: FaultPlan | None, fence: Fence = lambda: None) -> tuple[Channel, Channel]:
    """Channels to the trainer's and to the rollout's sidecar, which is that of all pods; nothing runs yet. ``directory`` has the recipe's
    ``config.yaml``. ``fence``: as of ``leading``."""
    pod_id, folder, threads = secrets.token_hex(6), directory / "pod", pod_threads(recipe)
    # It has what the processes of a pod share while they live; those of an earlier start are dead, and so may be its bytes.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)

    def inline_channel(role: Role) -> Channel:
        return InlineChannel(role, pod_id, lambda: make_worker(role, recipe, directory, threads))

    check_inline(recipe, inline)
    if inline:
        return inline_channel("trainer"), inline_channel("rollout")
    check_joining(recipe)
    credential = read_credential(Path(recipe.pods.credential_file)) if recipe.pods.credential_file else new_credential()
    write_credential(folder / "credential", credential)

    forks = pod_forks(recipe, directory, threads)

    def remote_channel(role: Role, count: int = 1) -> RemoteChannel:
        return RemoteChannel(
            role, directory, pod_id, folder / "credential", credential, recipe.machine.call_deadline_s, max(1, threads // count), faults,
            lease_s=recipe.coordination.lease_s, least_deadline_s=longest_episode_s(recipe) if role == "rollout" else 0.0,
            tls=tls_arguments(recipe.pods), forks=forks,
        )  # fmt: skip

    trainer, rollout = remote_channel("trainer"), remote_channel("rollout", recipe.pods.count)
    if not recipe.pods.are_several:
        return trainer, rollout
    pods = _rollout_pods(recipe, rollout, fence)
    return trainer if recipe.pods.trainer_count == 1 else _trainer_pods(recipe, trainer, pods), pods


def _trainer_pods(recipe: Recipe, first: RemoteChannel, rollout: RolloutPods) -> TrainerPods:
    """The trainer sidecars of the pods that train, each beside the rollout sidecar of its pod, of which ``first`` has rank 0. Where there are fewer pods of the
    run's own, the others are chosen of those that join."""
    count, joined = recipe.pods.trainer_count, None
    shares = ranks_of_pods(mesh_of(recipe.parallel), count)
    made = []
    for pod, ranks in zip(rollout.pods, shares, strict=False):
        channel = first
        if pod.number:
            assert isinstance(pod.channel, RemoteChannel)
            channel = replace(first, directory=pod.channel.directory, pod_id=secrets.token_hex(6), number=pod.number)
        made.append(TrainerPod(pod.number, channel, ranks, recipe.pods.host, pod.own_store))
    if count > len(made):
        assert rollout.joining is not None
        rollout.joining.folder, rollout.joining.proof = str(first.directory.absolute()), secrets.token_hex(16)
        (first.directory / "pod" / FOLDER_PROOF).write_text(rollout.joining.proof, encoding="ascii")
        joined = JoinedTrainers(count - len(made), len(made), rollout.joining, rollout.open_store, recipe.pods.join_timeout_s)
    return TrainerPods(made, first.directory, rank_threads(recipe), shares, joined)


def shared_store(recipe: AnyRecipe, directory: Path) -> str:
    """Returns the address of the store in which the pods of the run in ``directory`` find weights, empty if there is one pod, whose weights are not written
    to a storage either."""
    return store_address(recipe.coordination, directory) if recipe.pods.are_several or recipe.pods.weights_url else ""


def _rollout_pods(recipe: Recipe, first: RemoteChannel, fence: Fence) -> RolloutPods:
    """The rollout sidecars of all pods, of which ``first`` is beside the trainer. Each other one has a folder and a store of its own, as on another
    machine."""
    directory, rollout, pods = first.directory, recipe.rollout, recipe.pods
    address = shared_store(recipe, directory)
    member = replace(first, join=address)
    made = [RolloutPod(0, member, rollout.workers)]
    own = replace(recipe, coordination=CoordinationConfig(), pods=PodsConfig())
    for number in range(1, pods.count):
        folder = directory / "pods" / str(number)
        shutil.rmtree(folder / "pod", ignore_errors=True)
        (folder / "pod").mkdir(parents=True)
        (folder / "logs").mkdir(exist_ok=True)
        text = yaml.safe_dump(with_run_paths(to_mapping(own), folder, directory), sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        channel = replace(member, directory=folder, pod_id=secrets.token_hex(6), number=number, trainer_pod=first.pod_id)
        made.append(RolloutPod(number, channel, rollout.workers, store_address(own.coordination, folder), trains=number < pods.trainer_count))
    deadline_s = recipe.machine.call_deadline_s
    answer = LearnedDeadline(recipe.watchdog.deadline_factor, max(recipe.watchdog.min_deadline_s, longest_episode_s(recipe)), deadline_s + 10)
    joining = None
    if pods.may_join:
        text = yaml.safe_dump(to_mapping(own), sort_keys=False, allow_unicode=True)
        joining = Joining(text, first.credential, rollout.workers, pods.max_count - pods.count, pods.count, partial(led_revision, fence),
                          deadline_s, pods.heartbeat_timeout_s,
                          functions=sent_functions(recipe), sends_weights=recipe.trainer.lora is not None,
                          tls=tls_of(pods), keeps_checkpoints=bool(recipe.checkpoint.memory_every_steps), nodes=cluster_nodes(recipe, directory))  # fmt: skip
        WAITS.stacks_elsewhere = joining.stacks
    # A pod that was started elsewhere does it at its own address.
    sends_on = {"host": pods.host, "port": 0, "advertised": ""} if pods.peer_to_peer else {}
    return RolloutPods(
        made, lambda: open_store(address), address, rollout.engine.max_num_seqs, deadline_s, answer, joining, pods.min_count, pods.join_timeout_s, sends_on,
        pods.elementwise_deltas, pods.weights_url, reads_early=lambda pod: pods.pipeline == "always" or bool(pod.name), stages=lambda pod: _stages(recipe, pod),
    )  # fmt: skip


def cluster_nodes(recipe: AnyRecipe, directory: Path) -> Nodes:
    """Which nodes of the run in ``directory`` have failed, and which are cordoned in the run or in the cluster."""
    of_cluster = with_deadline(cluster_address(recipe.coordination), _CORDONS_S)
    return Nodes(directory.name, recipe.cluster.max_failures if recipe.cluster.spares else 0, lambda: open_store(of_cluster),
                 preflight=recipe.cluster if recipe.cluster.preflight else None)  # fmt: skip


def joining_of(rollout: Channel) -> Joining | None:
    """Returns the pods that are started elsewhere, of a run with these sidecars; ``None`` where none are."""
    return rollout.joining if isinstance(rollout, RolloutPods) else None


def nodes_of(rollout: Channel) -> Nodes | None:
    """Returns the cluster manager of a run with these sidecars; ``None`` where no pods are started elsewhere."""
    joining = joining_of(rollout)
    return None if joining is None else joining.nodes


def begin_again(rollout: Channel) -> None:
    """Says that the run goes on after these sidecars have ended: pods that joined may join again."""
    if isinstance(rollout, RolloutPods) and rollout.joining is not None:
        rollout.joining.goes_on = True


def _stages(recipe: Recipe, pod: RolloutPod) -> bool:
    """Returns whether the engine of ``pod`` stages weights: not where several are verified together, after they have taken them, and not where several on this
    machine would each make a second set at the same time."""
    pods, has_room = recipe.pods, bool(pod.name) or recipe.pods.count == 1 or recipe.shares_weights
    is_on = pods.pipeline == "always" or (pods.pipeline == "auto" and pods.may_join)
    return is_on and recipe.rollout.backend == "tandem" and pod.workers == 1 and has_room
