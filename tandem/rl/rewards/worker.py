"""A reward worker: ``python -m tandem.rl.rewards.worker --config JSON --channel FD`` loads the judges once and serves calls one by one.
Imports no torch. The judges' output goes to the worker's log; their standard input is empty.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path

from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.function_process import function_options
from tandem.rl.rewards.judgement import Item, Judge, JudgeCall, Judgement, TrainerState, describe
from tandem.rl.rewards.messages import JudgeAnswer, JudgeRequest, Loaded, items_from_json, judgements_to_json
from tandem.rl.rewards.rule_based import make_judge
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.storage.digests import bytes_digest
from tandem.types import UserError


class RewardWorker:
    """Loads the reward functions in the constructor; ``load`` reports the result, so that the workers of a pool load in parallel."""

    def __init__(self, config: str) -> None:
        self.judges: list[Judge] = []
        self.failure: UserError | None = None
        # One loop for all calls: a client that a function keeps belongs to the loop in which it was made.
        self.runner = asyncio.Runner()
        try:
            rewards = build(RewardsConfig, json.loads(config))
            self.judges = [make_judge(function, rewards) for function in rewards.composition]
            self.files = {judge.file: bytes_digest(Path(judge.file).read_bytes()) for judge in self.judges if judge.file}
        except UserError as error:
            traceback.print_exc()
            self.failure = error

    def load(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``Loaded``. Raises ``UserError`` if a function could not be loaded."""
        if self.failure is not None:
            raise self.failure
        judges = self.judges
        loaded = Loaded(
            [j.batched for j in judges], [j.reads_ids for j in judges], [j.is_async for j in judges], [j.scope for j in judges],
            [list(j.columns) for j in judges], self.files,
        )  # fmt: skip
        return message_meta(loaded), {}

    def judge(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Returns ``JudgeAnswer``."""
        request = message_from(JudgeRequest, meta)
        items, call = items_from_json(request.items), JudgeCall(TrainerState(*request.state), request.limit_s)
        results = judge_together([self.judges[index] for index in request.judges], items, call, self.runner)
        answer = JudgeAnswer(
            [[] if isinstance(result, BaseException) else judgements_to_json(result) for result in results],
            [describe(result) if isinstance(result, BaseException) else "" for result in results],
        )
        return message_meta(answer), {}


def judge_together(judges: Sequence[Judge], items: Sequence[Item], call: JudgeCall, runner: asyncio.Runner) -> list[list[Judgement] | BaseException]:
    """Returns for each judge its judgements or what it raised. Judges that have to be awaited are awaited together."""
    results: list[list[Judgement] | BaseException] = []
    awaited: dict[int, Awaitable[list[Judgement]]] = {}
    for judge in judges:
        try:
            # Outside of the loop, so that a function may run one of its own.
            result = judge.judge(items, call)
        except BaseException as error:  # SystemExit too: the function exits, not the worker.
            results.append(_printed(error))
        else:
            if isinstance(result, Awaitable):
                awaited[len(results)] = result
            results.append(result if isinstance(result, list) else [])
    if awaited:
        for place, outcome in zip(awaited, runner.run(_all(list(awaited.values()))), strict=True):
            results[place] = outcome
    return results


async def _all(awaited: Sequence[Awaitable[list[Judgement]]]) -> list[list[Judgement] | BaseException]:
    async def outcome(one: Awaitable[list[Judgement]]) -> list[Judgement] | BaseException:
        try:
            return await one
        except BaseException as error:
            return _printed(error)

    return list(await asyncio.gather(*map(outcome, awaited)))


def _printed(error: BaseException) -> BaseException:
    traceback.print_exception(error)
    sys.stderr.flush()
    return error


def main() -> None:
    value, channel = function_options(__doc__, "--config", "reward_worker")
    worker = RewardWorker(value)
    serve({"load": worker.load, "judge": worker.judge}, channel)


if __name__ == "__main__":
    main()
