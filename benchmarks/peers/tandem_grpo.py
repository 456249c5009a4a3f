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
from dataclasses import asdict
from pathlib import Path

from clock import Stopwatch
from lines import answer, command

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.layout.residents import KEEP
from tandem.model.huggingface.model_folder import to_huggingface
from tandem.pod.prompts import prompt_source
from tandem.pod.rollout_worker import RolloutWorker
from tandem.pod.trainer_worker import Progress, TrainerWorker
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.trainer.rank_process import rank_alone
from tandem.types import WeightVersion
from tandem.types.wire_records import decode_samples, encode_prompts, encode_scores


class Side:
    """The two workers, the prompts and the judges of one run."""

    def __init__(self, model: Path, directory: Path) -> None:
        import torch

        self.recipe = build(Recipe, read_yaml(directory / "config.yaml"))
        torch.set_num_threads(self.recipe.machine.threads)
        (directory / "pod").mkdir(exist_ok=True)
        rank = rank_alone(directory, threads=self.recipe.machine.threads)
        self.trainer, self.rollout = TrainerWorker(self.recipe, rank), RolloutWorker(self.recipe, directory)
        loaded, _ = self.trainer.load({"start": str(model), "step": None, **asdict(KEEP), "prefetch": []}, {}, _quiet)
        self.rollout.start_engine({"folder": str(model), "kernels": loaded["kernels"]}, {}, _quiet)
        self.prompts, self.rewards = prompt_source(self.recipe, model), RewardPool(self.recipe.rewards)
        self.serve_weights()

    def serve_weights(self) -> None:
        assert self.trainer.actor is not None and self.rollout.llm is not None
        self.rollout.llm.update_weights(to_huggingface(self.trainer.actor.replica.model), WeightVersion(1, self.trainer.steps))

    def step(self) -> tuple[float, float]:
        """(mean reward, mean tokens of a completion) of one step."""
        recipe, step = self.recipe, self.trainer.steps
        prompts = self.prompts.for_step(step)
        settings = sampling_settings(recipe.rollout, recipe.algorithm.group_size, recipe.run.seed)
        _, drawn = self.rollout.rollout({"step": step, "weights": step, "settings": settings}, {"prompts": encode_prompts(prompts)}, _quiet)
        samples = decode_samples(drawn["samples"])
        judging = self.rewards.submit(samples, prompts)
        if recipe.algorithm.kl_coef > 0:
            self.trainer.inference({"step": step}, drawn, _quiet)
        scores = judging.result()
        self.trainer.train({"step": step}, {**drawn, "scores": encode_scores(scores)}, _quiet)
        self.serve_weights()
        reward = sum(score.value or 0.0 for score in scores) / len(scores)
        return reward, sum(len(sample.token_ids) for sample in samples) / len(samples)


_quiet: Progress = lambda _: None


def main() -> None:
    profile_file = Path(sys.argv[5]) if sys.argv[4:5] == ["--profile"] else None
    side, watch, profile = Side(Path(sys.argv[1]), Path(sys.argv[3])), Stopwatch(), cProfile.Profile(time.process_time)
    with closing(side.rewards):
        answer(ready=True)
        while (words := command())[0] != "quit":
            if words[0] == "save":
                folder = Path(words[1]).resolve()
                side.trainer.export({"folder": str(folder), "critic": str(folder / "critic")}, {}, _quiet)
                answer(saved=words[1])
                continue
            if profile_file is not None and side.trainer.steps:
                profile.enable()
            watch.start()
            reward, length = side.step()
            took = watch.stop()
            profile.disable()
            answer(step=side.trainer.steps, reward=reward, mean_length=length, **took)
        if profile_file is not None:
            profile.dump_stats(profile_file)


main()
