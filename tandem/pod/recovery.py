"""What happens when a sidecar dies: it is replaced and brought back to the state that the run needs."""

from time import monotonic

from tandem.layout.residents import Phase
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.states import RolloutState, TrainerState

_AT_REST = (RolloutState.DOWN, RolloutState.TERMINATE_ENGINE, RolloutState.KEEP_ENGINE, RolloutState.SLEEP_ENGINE)


def recover(pod: Pod, death: SidecarDied, step: int) -> None:
    """Replaces what died; a trainer is brought back to the state after ``step`` steps. Raises ``RunError`` past ``run.max_restarts``."""
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


def catch_up(pod: Pod, step: int) -> None:
    """Takes the optimizer steps up to ``step`` that the trainer has not taken, from the journal."""
    assert pod.trainer_step is not None
    for replayed in range(pod.trainer_step, step):
        batch = pod.trained_on(replayed)
        pod.train(replayed, batch.samples, batch.scores)


def go_back(pod: Pod, step: int) -> None:
    """Brings the trainer back to the state after ``step`` steps, which it has passed, from the newest checkpoint before."""
    _discard_trainer(pod, step)
    pod.start_trainer(step)
    catch_up(pod, step)


def _replace(pod: Pod, death: SidecarDied, step: int) -> None:
    if death.role == "rollout":
        _discard_rollout(pod, step)
        pod.engine_step = None
        if not pod.online:
            # The trainer's segments still hold the weights; publishing them again keeps one path through the cycle.
            pod.onload(step, Phase.TRAIN)
        return
    _discard_trainer(pod, step)
    if pod.transitions.rollout not in _AT_REST:
        # It may be reading weights that ended with the trainer.
        _discard_rollout(pod, step)
    pod.start_trainer()
    pod.checkpoints.journal_loaded()
    catch_up(pod, step)


def _discard_trainer(pod: Pod, step: int) -> None:
    pod.trainer.channel.discard()
    pod.transitions.trainer_enters(TrainerState.DOWN, step)
    pod.online, pod.engine_step, pod.trainer_step, pod.published = False, None, None, None


def _discard_rollout(pod: Pod, step: int) -> None:
    pod.rollout.channel.discard()
    pod.transitions.rollout_enters(RolloutState.DOWN, step)
