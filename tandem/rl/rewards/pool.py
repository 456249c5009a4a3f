"""The reward pool: runs reward functions in separate processes, so that one that raises, hangs or dies costs only its sample."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.config.rewards import RewardsConfig
from tandem.rl.function_process import CallDied, CallHung, PoolClosed
from tandem.rl.rewards.batch import judge_batch
from tandem.rl.rewards.judgement import NO_STATE, Item, Judgement, TrainerState
from tandem.rl.rewards.judging import Judging, stages_of
from tandem.rl.rewards.work_queue import WorkQueue
from tandem.rl.rewards.worker_process import JudgeRaised, WorkerProcess
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.traces.context import enter, leave
from tandem.types import Prompt, RunError, Sample, Score, ScoreState, UserError

logger = logging.getLogger(__name__)
LOAD_ATTEMPTS = 4
"""Processes of one worker that may end while they load the functions."""


class RewardPool:
    """``config.workers`` processes that score samples. They wait without using the CPU, die with this process however it dies, and are
    replaced when they die. Their output goes to ``log_dir/reward-worker-N.log``.

    The constructor loads every function and raises ``UserError`` if one cannot be loaded.
    """

    def __init__(self, config: RewardsConfig, *, log_dir: Path | None = None) -> None:
        config.check()
        self.config = config
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._closed = threading.Event()
        self._work = WorkQueue(config.workers)
        self._open: set[Judging] = set()
        self._slots: list[_Slot] = []
        try:
            for i in range(config.workers):
                log = log_dir / f"reward-worker-{i}.log" if log_dir is not None else Path(os.devnull)
                self._slots.append(_Slot(config, log, self._closed, self._work))
            for slot in self._slots:
                slot.wait_ready()
        except BaseException:
            self.close()
            raise
        self._stages = stages_of(self._slots[0].worker.scopes, [bool(function.needs) for function in config.composition])
        for slot in self._slots:
            slot.thread.start()

    @property
    def files(self) -> Mapping[str, str]:
        """The digest of each file that defines a reward function."""
        return self._slots[0].worker.files

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """The columns that each reward function, by its label, cannot do without."""
        labels = (function.label for function in self.config.composition)
        return dict(zip(labels, self._slots[0].worker.columns, strict=True))

    def open(
        self, prompts: Sequence[Prompt], state: TrainerState = NO_STATE, *, group_size: int = 0, has_inference: bool = False, trace_ratio: float = 1.0
    ) -> Judging:
        """Begins a judgement to which samples are added as they finish. ``prompts`` contains each sample's prompt. ``state``: of the run, for the functions
        that ask for it. ``group_size``: samples of each prompt (0: not known). ``has_inference``: ``add_inferred`` follows; without it the functions that
        need it do not apply. ``trace_ratio``: share of the calls, besides the first, that have a span."""
        stages = [stage for stage in self._stages if has_inference or not stage.needs_inference]
        judging = Judging(self.config, stages, self._work.put, {prompt.id: prompt for prompt in prompts}, state, group_size, trace_ratio)
        self._open.add(judging)
        judging.future.add_done_callback(lambda _: self._open.discard(judging))
        if self._closed.is_set():
            judging.fail(RunError("the reward pool is closed"))
        return judging

    def submit(self, samples: Sequence[Sample], prompts: Sequence[Prompt], state: TrainerState = NO_STATE) -> "Future[list[Score]]":
        """Starts scoring ``samples``, which are all finished; the future returns the scores in their order. The other arguments are those of ``open``."""
        judging = self.open(prompts, state)
        judging.complete(samples)
        return judging.future

    def score(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], state: TrainerState = NO_STATE, inferred: Mapping[str, Sequence[Any]] | None = None
    ) -> list[Score]:
        """Scores ``samples`` and waits; returns the scores in their order. ``inferred``: the columns of ``Judging.add_inferred``."""
        judging = self.open(prompts, state, has_inference=inferred is not None)
        judging.complete(samples)
        if inferred is not None:
            judging.add_inferred(inferred)
        return judging.result()

    def close(self) -> None:
        """Terminates every worker and its child processes; pending scores raise ``RunError``."""
        self._closed.set()
        self._work.close()
        for judging in list(self._open):
            judging.fail(RunError("the reward pool was closed before the samples were judged"))
        for slot in self._slots:
            slot.worker.kill()  # unblocks the slot's thread
        for slot in self._slots:
            if slot.thread.ident is not None:
                slot.thread.join()
            slot.worker.kill()  # a worker that the thread may have started in the meantime

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_fault_share(scores: Sequence[Score], config: RewardsConfig) -> None:
    """Raises ``RunError`` if more than ``max_fault_share`` of ``scores`` are infrastructure faults."""
    faults = [score for score in scores if score.state is ScoreState.INFRASTRUCTURE_FAULT]
    if len(faults) > config.max_fault_share * len(scores):
        raise RunError(
            f"{len(faults)} of {len(scores)} samples could not be judged, a share of {len(faults) / len(scores):.3f}, above "
            f"rewards.max_fault_share ({config.max_fault_share:g}); the first: {faults[0].reason}"
        )


class _Slot:
    """A worker slot: its current process and the thread that calls it."""

    def __init__(self, config: RewardsConfig, log: Path, closed: threading.Event, work: WorkQueue) -> None:
        self.config, self.log, self.closed, self.work = config, log, closed, work
        self.worker = WorkerProcess(config, log, closed)
        self.thread = threading.Thread(target=self._run, name=f"rewards-{log.stem}", daemon=True)

    def wait_ready(self) -> None:
        """Waits until the worker has loaded the functions. One that ends meanwhile is started again, after a wait from the second time on. Raises
        ``UserError`` if it ends ``LOAD_ATTEMPTS`` times, and as ``WorkerProcess.wait_ready`` does."""
        backoff = Backoff()
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            try:
                return self.worker.wait_ready(self.config.start_deadline_s)
            except CallDied as death:
                logger.warning("%s: a reward worker ended while it loaded (%s), attempt %d of %d", self.log.name, death, attempt, LOAD_ATTEMPTS)
                how = str(death)
            if attempt < LOAD_ATTEMPTS:
                if self.closed.wait(backoff.wait_s(0)):
                    raise PoolClosed
                self.worker = WorkerProcess(self.config, self.log, self.closed)
        modules = ", ".join(f"'{function.function}'" for function in self.config.composition)
        where = f"; see '{self.log}'" if self.log != Path(os.devnull) else ""
        raise UserError(f"a reward worker ended {LOAD_ATTEMPTS} times while it loaded {modules} ({how}){where}")

    def _run(self) -> None:
        while (units := self.work.take()) is not None:
            judging, stage = units[0].judging, units[0].judging.stages[units[0].stage]
            items = judging.items_of(units)
            try:
                said = judge_batch(
                    items, stage.judges, self.worker.batched, self.worker.is_async, partial(self._call, judging), self.config, judging.left_s
                )
                judging.give(units, items, said)
            except PoolClosed:
                return  # ``close`` ends the judgements.
            except Exception as error:
                logger.exception("judging failed")
                judging.fail(error)

    def _call(self, judging: Judging, judges: Sequence[int], items: Sequence[Item], deadline_s: float) -> list[list[Judgement] | JudgeRaised]:
        if self.worker.ended():
            files = self.worker.files
            self.worker.kill()
            self.worker = WorkerProcess(self.config, self.log, self.closed)
            self.wait_ready()
            if changed := [file for file, digest in self.worker.files.items() if files.get(file) != digest]:
                self.worker.kill()
                raise UserError(f"'{changed[0]}' was changed while the run used it: restore it, or resume the run with it")
        began, token = time.perf_counter(), enter(judging.parts.choose())
        try:
            return self.worker.judge(judges, items, deadline_s, judging.state)
        except (CallHung, CallDied) as failure:
            names = ", ".join(self.config.composition[judge].label for judge in judges)
            what = f"'{names}' on sample '{items[0].sample_id}'" + (f" and {len(items) - 1} more" if len(items) > 1 else "")
            logger.warning("%s: a reward worker was lost: %s, in reward function %s", self.log.name, str(failure) or "it hung and was ended", what)
            raise
        finally:
            leave(token)
            judging.record_call(judges, began, time.perf_counter())
