"""Our side of the GRPO benchmarks: the pod's two workers in one process, driven as the peer is.

Commands and usage are those of ``trl_grpo.py``, with a folder that has the recipe's ``config.yaml`` in place of the settings:
``tandem_grpo.py MODEL PROMPTS.jsonl RUN``. A step is everything between two steps of a run: the prompts read and tokenised, the
rollout, the judges in their own process, the reference's pass where the recipe asks for one, the update, and the new weights
in the engine. With ``--profile FILE`` cProfile writes where the time of all steps but the first went.
"""

import cProfile
import sys
import time
from contextlib import closing
from pathlib import Path

from clock import Stopwatch
from lines import answer, command

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.layout.residents import KEEP, Phase
from tandem.model.huggingface.model_config import read_shapes
from tandem.pod.prompts import prompt_source
from tandem.pod.sidecars import RolloutSidecar, TrainerSidecar
from tandem.pod.start import open_channels
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.types import WeightVersion
from tandem.weight_transfer.manifest import segment_bytes


class Side:
    """The two sidecars, inline, the prompts and the judges of one run."""

    def __init__(self, model: Path, directory: Path) -> None:
        import torch

        self.recipe = recipe = build(Recipe, read_yaml(directory / "config.yaml"))
        torch.set_num_threads(recipe.machine.threads)
        trainer, rollout = open_channels(recipe, directory, True, None)
        self.trainer, self.rollout = TrainerSidecar(trainer), RolloutSidecar(rollout)
        trainer.start()
        rollout.start()
        loaded = self.trainer.load(model, None, KEEP, ())
        self.rollout.start_engine(model, loaded["kernels"])
        self.buffers = trainer.allocate(segment_bytes(read_shapes(model), recipe.trainer.dtype))
        self.prompts, self.rewards = prompt_source(recipe, model), RewardPool(recipe.rewards)
        self.steps = 0
        self.serve_weights()

    def serve_weights(self) -> None:
        version = WeightVersion(1, self.steps)
        self.trainer.offload(self.steps, release=False)
        self.trainer.convert(self.steps)
        self.trainer.register(version, self.buffers)
        self.rollout.update_weight(version)

    def step(self) -> tuple[float, float]:
        """(mean reward, mean tokens of a completion) of one step."""
        recipe, step = self.recipe, self.steps
        prompts = self.prompts.for_step(step)
        settings = sampling_settings(recipe.rollout, recipe.algorithm.group_size, recipe.run.seed)
        samples, _ = self.rollout.rollout(step, prompts, settings, weights=step)
        judging = self.rewards.submit(samples, prompts)
        self.trainer.onload(step, Phase.INFERENCE if recipe.has_inference else Phase.TRAIN)
        if recipe.has_inference:
            self.trainer.inference(step, samples)
        scores = judging.result()
        self.trainer.train(step, samples, scores)
        self.steps += 1
        self.serve_weights()
        reward = sum(score.value or 0.0 for score in scores) / len(scores)
        return reward, sum(len(sample.token_ids) for sample in samples) / len(samples)


def main() -> None:
    profile_file = Path(sys.argv[5]) if sys.argv[4:5] == ["--profile"] else None
    side, watch, profile = Side(Path(sys.argv[1]), Path(sys.argv[3])), Stopwatch(), cProfile.Profile(time.process_time)
    with closing(side.rewards):
        answer(ready=True)
        while (words := command())[0] != "quit":
            if words[0] == "save":
                folder = Path(words[1]).resolve()
                side.trainer.export(folder, folder.with_name(f"{folder.name}-critic"))
                answer(saved=words[1])
                continue
            if profile_file is not None and side.steps:
                profile.enable()
            watch.start()
            reward, length = side.step()
            took = watch.stop()
            profile.disable()
            answer(step=side.steps, reward=reward, mean_length=length, **took)
        if profile_file is not None:
            profile.dump_stats(profile_file)


main()
