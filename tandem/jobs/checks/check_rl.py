"""What is looked at before a run of reinforcement learning begins: its model, prompts, reward functions and memory."""

import contextlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.backends.environment import python_of
from tandem.backends.megatron.device_check import check_device
from tandem.backends.megatron.model_check import check_model
from tandem.backends.vllm.model_check import check_model as check_vllm_model
from tandem.config.engine import HEAD_METHODS, EngineArgs
from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe
from tandem.config.sft import SFTConfig
from tandem.engine.model_limits import check_kv_cache_dtype, check_vocabulary
from tandem.engine.spec_decode.draft_size import check_head
from tandem.estimate.disk_bytes import offloaded_bytes, rl_bytes_on_disk
from tandem.estimate.prompt_beginnings import NOT_KNOWN, Prompts
from tandem.jobs.checks.check_answers import check_agent_columns, check_answers, check_columns, check_episodes
from tandem.jobs.checks.check_counts import check_kv_cache, check_rl_counts
from tandem.jobs.checks.check_examples import check_shown
from tandem.jobs.checks.check_run import (
    check_disks,
    check_folder,
    check_model_on_mesh,
    check_offload,
    check_start_weights,
    check_storage,
    check_targets,
    describe_offloaded,
    folder_to_check,
    warn_of_cores,
)
from tandem.jobs.checks.check_value_model import check_reference, check_value_model
from tandem.jobs.pod_plan import kept_by_joined, plan_of
from tandem.layout.mesh import describe
from tandem.layout.mesh_check import check_engine_ranks
from tandem.layout.placement import check_placement, mesh_of, pods_of_ranks
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_json, read_shapes
from tandem.model.model_source import found_model
from tandem.model.quantization.formats import decoded_blocks
from tandem.pod.leadership import check_coordination
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.pod.residents.plan import PodPlan, largest_micro_batch
from tandem.pod.rl_models import published_bytes, rl_models
from tandem.pod.start import check_joining
from tandem.rl.agents.check_agent import check_agent
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.episode_tools import EpisodeTools
from tandem.runtime.machine.gpus import check_pod_device, pod_device
from tandem.storage.files import open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import Prompt, UserError
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.shared_memory import check_free
from tandem.weight_transfer.stored.stored_file import parse_name

LONGEST_PROMPT_SHOWN = 400
"""Characters of the first prompt that a dry run shows."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will need, known before it begins: memory of every phase, the plan of its residents, the
    most that its checkpoints, models and offloaded state take on the disk of its folder, lines on what is offloaded, warnings, the first prompt, the
    tokens of the ``prompts`` of the first step, lines on the ranks of several trainer pods, and the bytes of checkpoints that a pod which joins keeps in
    memory."""

    pod: PodPlan
    disk_bytes: int
    offloaded: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    first_prompt: str = ""
    prompts: Prompts = NOT_KNOWN
    mesh: tuple[str, ...] = ()
    kept_by_joined: int = 0

    def lines(self) -> list[str]:
        """For a person, one line a figure."""
        mebibytes = {name: getattr(self.pod.host, name) / 2**20 for name in ("trainer", "rollout", "inference", "segments")}
        return [
            *self.mesh,
            *self.pod.describe(),
            *(f"predicted {name}: {size:,.0f} MiB" for name, size in mebibytes.items()),
            *([f"predicted checkpoints in memory: {self.pod.host.kept / 2**20:,.0f} MiB"] if self.pod.host.kept else []),
            *([f"predicted checkpoints in the memory of a pod that joins: at most {self.kept_by_joined / 2**20:,.0f} MiB"] if self.kept_by_joined else []),
            f"predicted disk: {self.disk_bytes / 2**20:,.0f} MiB",
            *self.offloaded,
            *self.warnings,
            f"first prompt: {self.first_prompt}",
        ]


def check_rl_run(recipe: Recipe) -> RunPlan:
    """Refuses, before any work, what the recipe's own checks cannot see: files and folders that are not what it says,
    prompts that do not fit, a machine that is too small."""
    for backend in (recipe.trainer.backend, recipe.rollout.backend):
        if backend != "tandem":
            python_of(backend)
    check_offload(recipe.trainer, check_pod_device(recipe.machine, recipe.ranks_here, recipe.rollout.engine_ranks))
    with ExitStack() as stack:
        folder = stack.enter_context(folder_to_check(recipe.model))
        if recipe.model.create is None:
            _check_folder(recipe.model, folder)
        shapes, context = read_shapes(folder, implemented_by=recipe.model.implemented_by), context_tokens(recipe.model, recipe.rollout.max_tokens, folder)
        if recipe.rollout.backend == "vllm":
            check_vllm_model(shapes, pod_device(recipe.machine), recipe)
            if decoded_blocks(read_json(folder / "config.json"), str(folder)) is not None:
                raise UserError(f"'{recipe.model.path}' is in fp8, which vLLM keeps and published weights are not in; set rollout.backend to tandem")
        check_placement(recipe.parallel)
        check_model_on_mesh(shapes, recipe.parallel, recipe.trainer)
        if recipe.trainer.backend == "megatron":
            check_model(shapes, recipe.parallel)
            check_device()
        check_engine_on_model(recipe.rollout.engine, folder, shapes)
        if recipe.has_critic and recipe.critic.path:
            valued = check_value_model(recipe.critic.path, "critic.path", folder, shapes, context)
            check_model_on_mesh(valued, recipe.parallel, recipe.trainer)
        if recipe.reference.path:
            check_model_on_mesh(check_reference(recipe.reference.path, folder, shapes, context, recipe.model.implemented_by), recipe.parallel, recipe.trainer)
        if recipe.reward_model.path:
            scorer = check_value_model(recipe.reward_model.path, "reward_model.path", folder, shapes, context, needs_head=True)
            check_model_on_mesh(scorer, recipe.parallel, recipe.trainer)
        if recipe.sft is not None:
            _check_batch(recipe.sft, recipe.parallel)
        planned = _check_pod(recipe, shapes, context, folder)
        _check_own_storage(recipe.pods.weights_url)
        source = stack.enter_context(contextlib.closing(prompt_source(recipe, folder)))
        if recipe.rollout.multi_turn is not None:
            # One worker shows whether the tools load.
            EpisodeTools.open(replace(recipe.rollout.multi_turn, tool_workers=1), recipe.task.tools, folder).pool.close()
        agent, of_agent, warnings = recipe.rollout.agent, list[str](), list[str]()
        if agent is not None:
            of_agent, warnings = check_agent(agent, folder)
        check_answers(source, recipe.rewards)
        check_episodes(source, recipe.rollout.agent is not None)
        prompts = source.for_step(0)
        if agent is not None:
            check_agent_columns(prompts[0].columns, agent.function, of_agent)
        first, tokens_of_prompts = prompts[0], Prompts.of([prompt.token_ids for prompt in prompts])
        check_rl_counts(recipe, planned.host, context, source.task.size)
        if recipe.sft is not None:
            check_shown(source, recipe.sft.demonstrations, folder)
    check_folder("trainer.offload_folder", recipe.trainer.offload_folder)
    check_targets(recipe.checkpoint, recipe.registry)
    check_joining(recipe)
    check_coordination(recipe.coordination, recipe.run.name or "run")
    # One worker shows whether the functions load.
    with RewardPool(replace(recipe.rewards, workers=1)) as rewards:
        check_columns(first.columns, rewards.columns)
    models = rl_models(recipe, shapes)
    critic = models.critic
    trained = [shapes] if critic is None else [shapes, critic]
    tokens, _ = largest_micro_batch(recipe.rollout, recipe.algorithm, recipe.trainer, context)
    offloaded = sum(offloaded_bytes(each, recipe.trainer, tokens, recipe.parallel) for each in trained)
    offloaded += planned.chosen.disk
    disk = rl_bytes_on_disk(shapes, recipe.trainer, recipe.checkpoint.keep, beside=models.saved_beside, follows=recipe.reference.follows)
    disk = check_disks(recipe.run.directory, recipe.trainer, disk, offloaded)
    warnings += warn_of_cores(recipe.ranks_here) if planned.gpu is None else []
    return RunPlan(
        planned, disk, tuple(describe_offloaded(recipe.trainer, offloaded)), tuple(warnings), _shown(first), tokens_of_prompts, tuple(_trainer_pods(recipe)),
        kept_by_joined(recipe, shapes),
    )


def _trainer_pods(recipe: Recipe) -> list[str]:
    """Returns lines on which of several trainer pods has which ranks."""
    shape, count = mesh_of(recipe.parallel), recipe.pods.trainer_count
    return describe(shape, pods_of_ranks(shape, count), "trainer pod") if count > 1 else []


def _shown(prompt: Prompt) -> str:
    """Returns the text that the model reads, with its templates, on one line."""
    text = repr(prompt.text)
    shown = text if len(text) <= LONGEST_PROMPT_SHOWN else f"{text[:LONGEST_PROMPT_SHOWN]}... ({len(prompt.text):,} characters)"
    return f"{shown}, {len(prompt.token_ids):,} tokens"


def check_pod(recipe: Recipe) -> None:
    """Raises ``UserError`` or ``RunError`` where the pod of ``recipe`` cannot start on this machine as it is now, for a run that is resumed: before its
    stage of fine-tuning goes on."""
    with folder_to_check(recipe.model) as folder:
        shapes = read_shapes(folder, implemented_by=recipe.model.implemented_by)
        _check_pod(recipe, shapes, context_tokens(recipe.model, recipe.rollout.max_tokens, folder), folder)


def _check_pod(recipe: Recipe, shapes: ModelShapes, context: int, folder: Path) -> PodPlan:
    """Returns the memory plan. Raises as ``check_pod``: for numpy that is missing, a KV cache that is too small, memory, and shared memory for the two weight
    buffers."""
    if recipe.pods.elementwise_deltas and not elementwise.is_available():
        raise UserError("'pods.elementwise_deltas' is true and needs numpy, which is not installed; pip install 'tandem-rl[deltas]', or set it to false")
    check_storage("pods.weights_url", recipe.pods.weights_url)
    check_kv_cache(recipe.rollout.engine, context)
    planned = plan_of(recipe, shapes, context, folder)
    check_free(_weight_buffers(recipe, shapes))
    return planned


def weight_buffers_bytes(recipe: Recipe) -> int:
    """Returns the bytes of shared memory that the weight buffers of a run of ``recipe`` take on the machine that begins it. Raises ``UserError`` without its
    model."""
    with folder_to_check(recipe.model) as folder:
        return _weight_buffers(recipe, read_shapes(folder, implemented_by=recipe.model.implemented_by))


def _weight_buffers(recipe: Recipe, shapes: ModelShapes) -> int:
    """Two for each pod: one is read while the other is written."""
    return 2 * recipe.pods.count * published_bytes(recipe, shapes)


def _check_own_storage(url: str) -> None:
    """Raises ``UserError`` if the storage at ``url`` has the weights of a run, for one that begins."""
    held = [file.name for file in open_storage(url).files() if parse_name(file.name) is not None] if url else []
    if held:
        raise UserError(f"'pods.weights_url' is '{url}', which has the weights of another run ('{held[-1]}'); give each run a folder of its own, or empty it")


def _check_folder(model: ModelConfig, folder: Path) -> None:
    """Raises ``UserError`` for a folder that is not the whole of ``model``."""
    shapes = read_shapes(folder, implemented_by=model.implemented_by)
    check_vocabulary(Tokenizer.from_folder(folder), folder, shapes)
    check_start_weights(model.path or "", folder, shapes)


def check_engine_on_model(engine: EngineArgs, folder: Path, shapes: ModelShapes) -> None:
    """Raises ``UserError`` where the engine's ranks do not divide the model of ``shapes`` in ``folder``, or its draft model or head is missing or belongs to
    another one."""
    check_engine_ranks(shapes, engine.tensor_parallel_size, engine.deterministic, "'rollout.engine.tensor_parallel_size'")
    check_kv_cache_dtype(shapes, engine.kv_cache_dtype, "'rollout.engine.kv_cache_dtype'")
    speculative = engine.speculative_config
    if speculative is None:
        return
    draft = speculative.model
    if speculative.method in HEAD_METHODS:
        check_head(speculative, folder, shapes, folder if draft is None else found_model(draft))
    elif draft is not None and (size := read_shapes(found_model(draft)).vocab_size) != shapes.vocab_size:
        raise UserError(
            f"'rollout.engine.speculative_config.model' is '{draft}', which has a vocabulary of {size} tokens, and the model has {shapes.vocab_size}; "
            "name a model with the same vocabulary"
        )


def _check_batch(sft: SFTConfig, parallel: ParallelConfig) -> None:
    if sft.batch_size < parallel.data:
        raise UserError(
            f"'parallel.data' is {parallel.data} and a step of section 'sft' has {sft.batch_size} demonstrations; raise sft.batch_size, so "
            "that every rank has one"
        )
