"""What happens when a sidecar dies: it is replaced and brought back to the run's current step."""

from time import monotonic

from tandem.layout.residents import Phase
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.states import RolloutState, TrainerState

_AT_REST = (RolloutState.DOWN, RolloutState.TERMINATE_ENGINE, RolloutState.KEEP_ENGINE, RolloutState.SLEEP_ENGINE)


def recover(pod: Pod, death: SidecarDied, step: int) -> None:
    """Replaces what died and brings the pod back to ``step``. Raises ``RunError`` past ``run.max_restarts``."""
    began = monotonic()
    while True:
        pod.restarts.begin(death, step)
        try:
            _replace(pod, death, step)
            break
        except SidecarDied as again:
            death = again
    pod.restarts.ended(death, step, monotonic() - began)


def clear(pod: Pod, death: SidecarDied, step: int) -> None:
    """Counts a death before the run has a state to return to, and discards the sidecar."""
    pod.restarts.begin(death, step)
    sidecar = pod.trainer if death.role == "trainer" else pod.rollout
    sidecar.channel.discard()
    pod.transitions.trainer_enters(TrainerState.DOWN, step)
    pod.restarts.ended(death, step)


def _replace(pod: Pod, death: SidecarDied, step: int) -> None:
    if death.role == "rollout":
        _discard_rollout(pod, step)
        pod.engine_step = None
        if not pod.online:
            # The trainer's segments still hold the weights; publishing them again keeps one path through the cycle.
            pod.onload(step, Phase.TRAIN)
        return
    pod.trainer.channel.discard()
    pod.transitions.trainer_enters(TrainerState.DOWN, step)
    pod.online, pod.engine_step, pod.trainer_step = False, None, None
    if pod.transitions.rollout not in _AT_REST:
        # It may be reading weights that ended with the trainer.
        _discard_rollout(pod, step)
    at = pod.start_trainer()
    pod.journal_loaded()
    for replayed in range(at, step):
        batch = pod.trained_on(replayed)
        pod.train(replayed, batch.samples, batch.scores)


def _discard_rollout(pod: Pod, step: int) -> None:
    pod.rollout.channel.discard()
    pod.transitions.rollout_enters(RolloutState.DOWN, step)
