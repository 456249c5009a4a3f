"""The reward pool: runs reward functions in separate processes, so that one that raises, hangs or dies costs only its sample."""

import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType

from tandem.config.rewards import RewardsConfig
from tandem.rl.function_process import CallDied, CallHung, PoolClosed
from tandem.rl.rewards.batch import judge_batch
from tandem.rl.rewards.judgement import NO_STATE, Item, Judgement, TrainerState
from tandem.rl.rewards.rule_based import compose
from tandem.rl.rewards.worker_process import JudgeRaised, WorkerProcess
from tandem.runtime.process.backoff import Backoff
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
        self._slots: list[_Slot] = []
        try:
            for i in range(config.workers):
                log = log_dir / f"reward-worker-{i}.log" if log_dir is not None else Path(os.devnull)
                self._slots.append(_Slot(config, log, self._closed))
            for slot in self._slots:
                slot.wait_ready()
        except BaseException:
            self.close()
            raise
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

    def submit(self, samples: Sequence[Sample], prompts: Sequence[Prompt], state: TrainerState = NO_STATE) -> "Future[list[Score]]":
        """Starts scoring; the future returns the scores in the order of ``samples``. ``prompts`` contains each sample's prompt. ``state``: of the run, for
        the functions that ask for it."""
        by_id = {prompt.id: prompt for prompt in prompts}
        items = [_item(sample, by_id[sample.prompt_id]) for sample in samples]
        result: Future[list[Score]] = Future()
        result.set_running_or_notify_cancel()
        parts = divide([sample.prompt_id for sample in samples], len(self._slots))
        if self._closed.is_set():
            result.set_exception(RunError("the reward pool is closed"))
            return result
        gathered = _Gathered(len(parts), result, self.config)
        for i, part in enumerate(parts):
            self._slots[i].work.put(_Work(items[part], i, gathered, state))
        if not parts:
            result.set_result([])
        return result

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], state: TrainerState = NO_STATE) -> list[Score]:
        """Scores ``samples`` and waits; returns the scores in their order."""
        return self.submit(samples, prompts, state).result()

    def close(self) -> None:
        """Terminates every worker and its child processes; pending scores raise ``RunError``."""
        self._closed.set()
        for slot in self._slots:
            slot.work.put(None)
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


def divide(prompt_ids: Sequence[str], parts: int) -> list[slice]:
    """Returns at most ``parts`` slices of about equal length, none empty, that keep the samples of a prompt together."""
    starts = [i for i, prompt_id in enumerate(prompt_ids) if i == 0 or prompt_id != prompt_ids[i - 1]]
    bounds = [0]
    for part in range(1, parts):
        wanted = part * len(prompt_ids) / parts
        bound = next((start for start in starts if start >= wanted), len(prompt_ids))
        if bound > bounds[-1]:
            bounds.append(bound)
    ends = [*bounds[1:], len(prompt_ids)]
    return [slice(start, end) for start, end in zip(bounds, ends, strict=True) if end > start]


def _item(sample: Sample, prompt: Prompt) -> Item:
    return Item(sample.id, prompt.text, sample.text, sample.token_ids, prompt.ground_truth, prompt.task, prompt.columns, prompt.messages)


class _Gathered:
    """Collects the parts of a batch and resolves its future."""

    def __init__(self, parts: int, result: "Future[list[Score]]", config: RewardsConfig) -> None:
        self._parts: list[list[Score] | None] = [None] * parts
        self._result, self._config, self._lock = result, config, threading.Lock()

    def give(self, part: int, items: Sequence[Item], said: Sequence[dict[str, Judgement]]) -> None:
        scores = [compose(item.sample_id, judged, self._config) for item, judged in zip(items, said, strict=True)]
        with self._lock:
            self._parts[part] = scores
            done = [part_scores for part_scores in self._parts if part_scores is not None]
            if len(done) == len(self._parts) and not self._result.done():
                self._result.set_result([score for part_scores in done for score in part_scores])

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._result.done():
                self._result.set_exception(error)


class _Work:
    def __init__(self, items: Sequence[Item], part: int, gathered: _Gathered, state: TrainerState) -> None:
        self.items, self.part, self.gathered, self.state = items, part, gathered, state


class _Slot:
    """A worker slot: its current process and the thread that calls it."""

    def __init__(self, config: RewardsConfig, log: Path, closed: threading.Event) -> None:
        self.config, self.log, self.closed = config, log, closed
        self.work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
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
        closed = False
        while (work := self.work.get()) is not None:
            try:
                if closed:
                    raise PoolClosed
                said = judge_batch(work.items, self.worker.batched, self.worker.is_async, partial(self._call, work.state), self.config)
                work.gathered.give(work.part, work.items, said)
            except PoolClosed:
                closed = True
                work.gathered.fail(RunError("the reward pool was closed before the samples were judged"))
            except Exception as error:
                logger.exception("judging failed")
                work.gathered.fail(error)

    def _call(self, state: TrainerState, judges: Sequence[int], items: Sequence[Item], deadline_s: float) -> list[list[Judgement] | JudgeRaised]:
        if self.worker.ended():
            files = self.worker.files
            self.worker.kill()
            self.worker = WorkerProcess(self.config, self.log, self.closed)
            self.wait_ready()
            if changed := [file for file, digest in self.worker.files.items() if files.get(file) != digest]:
                self.worker.kill()
                raise UserError(f"'{changed[0]}' was changed while the run used it: restore it, or resume the run with it")
        try:
            return self.worker.judge(judges, items, deadline_s, state)
        except (CallHung, CallDied) as failure:
            logger.warning("%s: a reward worker was lost: %s", self.log.name, str(failure) or "it hung and was ended")
            raise
