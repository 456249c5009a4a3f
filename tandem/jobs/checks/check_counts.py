"""Checks that what a recipe counts (prompts, samples, demonstrations, processes) fits on the machine, before any of it is made."""

import resource
from pathlib import Path

from tandem.config.engine import EngineArgs
from tandem.config.evaluation import EvaluationConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import DataConfig
from tandem.config.recipe import Recipe
from tandem.config.rewards import RewardsConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.sft import SFTConfig
from tandem.estimate.count_bytes import AGENT_WORKER_BYTES, REWARD_WORKER_BYTES, WORKER_FILES, row_bytes, sampled_bytes
from tandem.estimate.memory import PodMemory
from tandem.estimate.training_bytes import SEQUENCE_BYTES, TOKEN_BYTES, batch_bytes
from tandem.runtime.machine.available_memory import available_bytes, total_bytes
from tandem.types import RunError, UserError

FILES_OF_A_RUN = 64
"""Descriptors of a controller without reward workers: measured 30, and room for those of the user's functions."""
BLOCK_TOKENS = 16
"""Tokens of a KV block (``kernels.api.BLOCK_TOKENS``, which needs torch)."""


def check_rl_counts(recipe: Recipe, planned: PodMemory, context: int, task_size: int | None) -> None:
    """Raises ``RunError`` or ``UserError`` where a count of ``recipe`` needs more than this machine has. ``planned``: of its pod. ``context``: tokens of
    prompt and completion. ``task_size``: the task's number of training prompts, ``None`` if they are generated."""
    available = available_bytes(recipe.machine.memory_gib)
    check_evaluation(recipe.evaluation, recipe.rollout, available, task_size)
    check_workers(recipe.rewards, recipe.rollout, available, planned.largest_phase, recipe.pods.count)
    check_rows(recipe.rollout.engine, context)
    if recipe.sft is not None:
        check_sft_batch(recipe.sft, recipe.parallel, context, available, planned.trainer)


def check_evaluation(evaluation: EvaluationConfig, rollout: RolloutConfig, available: int, task_size: int | None) -> None:
    """Raises ``RunError`` if the prompts and samples of an evaluation are more than ``available`` bytes."""
    for name in ("prompts", "final_prompts"):
        check_prompts(f"'evaluation.{name}'", getattr(evaluation, name), rollout, available, task_size)


def check_prompts(what: str, count: int, rollout: RolloutConfig, available: int, task_size: int | None) -> None:
    """Raises ``RunError`` if ``count`` prompts, named ``what``, and a completion of each are more than ``available`` bytes. A task of a file has no more
    prompts than it holds."""
    needed = sampled_bytes(count if task_size is None else min(count, task_size), 1, rollout.max_tokens)
    if needed > available:
        raise RunError(
            f"{what} is {count}: with completions of up to rollout.max_tokens ({rollout.max_tokens}) tokens they need {needed / 2**30:,.2f} GiB and "
            f"{available / 2**30:,.2f} GiB are available; lower one of them"
        )


def check_workers(rewards: RewardsConfig, rollout: RolloutConfig, available: int, beside: int, pods: int = 1) -> None:
    """Raises ``RunError`` if the processes of the user's functions do not fit in ``available`` bytes, of which the run's ``pods`` take ``beside``, or are
    more than their owner may open files for or the machine may run."""
    engines = pods * rollout.workers
    _check_processes("rewards.workers", rewards.workers, 1, REWARD_WORKER_BYTES, available, beside)
    if rollout.multi_turn is not None:
        _check_processes("rollout.multi_turn.tool_workers", rollout.multi_turn.tool_workers, engines, REWARD_WORKER_BYTES, available, beside)
    if rollout.agent is not None:
        _check_processes("rollout.agent.workers", rollout.agent.workers, engines, AGENT_WORKER_BYTES, available, beside)


def _check_processes(key: str, count: int, owners: int, size: int, available: int, beside: int) -> None:
    """Checks ``count`` processes of ``size`` bytes for each of ``owners``."""
    what = f"'{key}' is {count}" if owners == 1 else f"'{key}' is {count} for each of {owners} rollout workers"
    needed = count * owners * size
    if count * owners > 1 and beside + needed > available:
        left = max(available - beside, 0)
        raise RunError(
            f"{what}: as many processes need at least {needed / 2**30:,.2f} GiB and {left / 2**30:,.2f} GiB are available beside trainer and engine; lower it "
            f"to {max(left // (size * owners), 1)} or less"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and FILES_OF_A_RUN + count * WORKER_FILES > files:
        most = max((files - FILES_OF_A_RUN) // WORKER_FILES, 1)
        raise RunError(f"{what}, and this process may open {files} files, {WORKER_FILES} for each worker; lower it to {most} or raise 'ulimit -n'")
    processes = _most_processes()
    if count * owners > processes:
        raise RunError(f"{what}, and this machine may run {processes} processes; lower it")


def check_sft_batch(sft: SFTConfig, parallel: ParallelConfig, context: int, available: int, training: int) -> None:
    """Raises ``RunError`` if the batches of section ``sft`` do not fit in ``available`` bytes beside ``training``, those of the trainer's ranks."""
    needed = parallel.world * batch_bytes(DataConfig(sequence_length=context, global_batch_size=sft.batch_size), parallel)
    if training + needed > available:
        raise RunError(
            f"'sft.batch_size' is {sft.batch_size}: its batches need up to {needed / 2**30:,.2f} GiB beside {training / 2**30:,.2f} GiB of training and "
            f"{available / 2**30:,.2f} GiB are available; lower it"
        )


def check_held_out(sequences: int, length: int, parallel: ParallelConfig, available: int) -> None:
    """Raises ``RunError`` if ``sequences`` held-out sequences of ``length`` tokens, which an evaluation holds at once, need more than ``available``
    bytes."""
    each = -(-sequences // parallel.data)
    needed = parallel.world * each * (SEQUENCE_BYTES + length * TOKEN_BYTES)
    if needed > available:
        raise RunError(
            f"'evaluation.sequences' is {sequences}: as many of {length} tokens need {needed / 2**30:,.2f} GiB and {available / 2**30:,.2f} GiB are "
            "available; lower it"
        )


def check_kv_cache(engine: EngineArgs, context: int) -> None:
    """Raises ``UserError`` for a KV cache that cannot hold one sequence of ``context`` tokens."""
    if engine.kv_cache_tokens and -(-engine.kv_cache_tokens // BLOCK_TOKENS) < -(-context // BLOCK_TOKENS):
        raise UserError(
            f"'rollout.engine.kv_cache_tokens' is {engine.kv_cache_tokens}, too few for one sequence of {context} tokens, the context; raise it to "
            f"{-(-context // BLOCK_TOKENS) * BLOCK_TOKENS} or more, or lower model.max_length"
        )


def check_rows(engine: EngineArgs, context: int) -> None:
    """Raises ``UserError`` if this machine cannot hold the rows of the sequences that decode at once."""
    needed, total = engine.max_num_seqs * row_bytes(context), total_bytes()
    if needed > total:
        raise UserError(
            f"'rollout.engine.max_num_seqs' is {engine.max_num_seqs}, which needs {needed / 2**30:,.1f} GiB for sequences of {context} tokens, and this "
            f"machine has {total / 2**30:,.1f} GiB; lower it"
        )


def _most_processes() -> int:
    """Returns the number of processes that the system allows: the user's limit, the cgroup's and the kernel's."""
    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    for path in ("/sys/fs/cgroup/pids.max", "/proc/sys/kernel/pid_max"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    return min([limit for limit in limits if limit >= 0], default=2**31)
