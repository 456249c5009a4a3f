"""Runs ``tandem`` and changes one log-probability of the samples of a step as the engine returns them: ``python altered_sample.py STEP ARGUMENTS``.

Only the controller is changed, which holds no tensors. The trainer, the engine and their shims are unchanged.
"""

import sys
from dataclasses import replace
from typing import Any

from tandem.cli.main import main
from tandem.pod.pod import Pod
from tandem.pod.states import RolloutState
from tandem.types import Prompt, Sample


def alter(step: int) -> None:
    roll_out = Pod.roll_out

    def roll_out_and_alter(
        pod: Pod, at: int, prompts: list[Prompt], settings: dict[str, Any], state: RolloutState = RolloutState.ROLLOUT, **more: Any
    ) -> list[Sample]:
        samples = roll_out(pod, at, prompts, settings, state, **more)
        if at == step and state is RolloutState.ROLLOUT:
            first = samples[0]
            samples[0] = replace(first, logprobs=(first.logprobs[0] - 2.0**-12, *first.logprobs[1:]))
        return samples

    Pod.roll_out = roll_out_and_alter  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    alter(int(sys.argv[1]))
    sys.argv[1:2] = []
    sys.exit(main())
