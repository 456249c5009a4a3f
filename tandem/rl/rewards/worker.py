"""A reward worker: ``python -m tandem.rl.rewards.worker --config JSON --channel FD`` loads the judges once and serves calls one by one.
Imports no torch. The judges' output goes to the worker's log; their standard input is empty.
"""

import argparse
import json
import os
import sys
import traceback

from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import Judge, describe
from tandem.rl.rewards.messages import JudgeAnswer, JudgeRequest, Loaded, items_from_json, judgements_to_json
from tandem.rl.rewards.rule_based import make_judge
from tandem.runtime.process.worker import dump_stack_on_abort, serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.types import UserError


class RewardWorker:
    """Loads the reward functions in the constructor; ``load`` reports the result, so that the workers of a pool load in parallel."""

    def __init__(self, config: str) -> None:
        self.judges: list[Judge] = []
        self.failure: UserError | None = None
        try:
            rewards = build(RewardsConfig, json.loads(config))
            self.judges = [make_judge(function, rewards) for function in rewards.composition]
        except UserError as error:
            traceback.print_exc()
            self.failure = error

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``Loaded``. Raises ``UserError`` if a function could not be loaded."""
        if self.failure is not None:
            raise self.failure
        return message_meta(Loaded([judge.batched for judge in self.judges], [judge.reads_ids for judge in self.judges])), {}

    def judge(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``JudgeAnswer``."""
        request = message_from(JudgeRequest, meta)
        items = items_from_json(request.items)
        try:
            answer = JudgeAnswer(judgements_to_json(self.judges[request.judge].judge(items)))
        except BaseException as error:  # SystemExit too: the function exits, not the worker.
            traceback.print_exc()
            sys.stderr.flush()
            answer = JudgeAnswer([], describe(error))
        return message_meta(answer), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    # Standard input is already empty; standard output is redirected to standard error, which is the worker's log.
    os.dup2(2, 1)
    dump_stack_on_abort()
    worker = RewardWorker(options.config)
    serve({"load": worker.load, "judge": worker.judge}, options.channel)


if __name__ == "__main__":
    main()
