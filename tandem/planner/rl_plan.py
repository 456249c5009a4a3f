"""The step of a recipe of reinforcement learning on GPUs, with a layout of its trainer. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tandem.config.recipe import Recipe
from tandem.estimate.draft_work import draft_passes
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.rl_step import RLStep, RLStepTime, predict_rl_step
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.speculation import Speculation
from tandem.layout.shapes import ModelShapes
from tandem.planner.measured_run import MeasuredRun, read_measured_run
from tandem.planner.recipe_step import sequence_tokens
from tandem.planner.score import Score
from tandem.pod.rl_models import engine_draft
from tandem.types.errors import UserError

USUAL_PROMPT = 512
PHASES = ("rollout", "weight_update", "switch", "inference", "training")


@dataclass(frozen=True, slots=True)
class RLPlan:
    """``step``: what was predicted; ``time``: its phases. ``assumed``: what the recipe does not say, in a sentence."""

    step: RLStep
    time: RLStepTime
    assumed: str


def described_rl_step(
    recipe: Recipe, scored: Score, prompt_tokens: int | None, response_tokens: int | None, response_p95: int | None, draft_acceptance: float | None = None,
    shared_prefix: int | None = None, measured: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Returns the predicted step of ``recipe`` with the layout of ``scored``, on whose GPUs the engines are as well, as text and as an object; of an engine
    that does not fit, the reason. ``measured``: the folder of a run, which gives what is ``None``. Lengths that neither gives are assumed, and that drafts
    save nothing and no prompts begin alike. Raises ``UserError`` for lengths that no sequence has, an acceptance that no draft has, and a folder of no run."""
    config = recipe.rollout.engine.speculative_config
    if draft_acceptance is not None and config is None:
        raise UserError("--draft-acceptance is given and the recipe has no rollout.engine.speculative_config; leave it out or name the drafts")
    if draft_acceptance is not None and not 0 <= draft_acceptance <= 1:
        raise UserError(f"--draft-acceptance is {draft_acceptance:g}; it must be from 0 to 1")
    run = None if measured is None else read_measured_run(measured, scored.shapes)
    from_run = [name for name, value in (("prompts", prompt_tokens), ("completions", response_tokens)) if value is None]
    if run is not None:
        prompt_tokens = prompt_tokens if prompt_tokens is not None else round(run.prompts.mean)
        response_tokens = response_tokens if response_tokens is not None else max(1, round(run.response_tokens))
        draft_acceptance = draft_acceptance if draft_acceptance is not None or config is None else run.draft_acceptance
        _check_measured(recipe, scored.shapes, str(measured), from_run, prompt_tokens, response_tokens)
    prompts, outputs, assumed = _lengths(recipe, scored.shapes, prompt_tokens, response_tokens, response_p95)
    if shared_prefix is not None and not 0 <= shared_prefix <= prompts.mean:
        raise UserError(f"--shared-prefix is {shared_prefix}; it must be from 0 to {prompts.mean:,.0f}, the mean tokens of a prompt")
    if config is not None and draft_acceptance is None:
        assumed = ", ".join(filter(None, (assumed, f"drafts by '{config.method}' that save nothing (--draft-acceptance)")))
    alike = Prompts.with_prefix(prompts.mean, shared_prefix) if shared_prefix else None if run is None or shared_prefix == 0 else run.prompts
    try:
        plan = plan_rl_step(recipe, scored, prompts, outputs, assumed, draft_acceptance, alike, 0.0 if run is None else run.begun)
    except UserError as error:
        return f"step of reinforcement learning: not predicted, {error}", {"refused": str(error)}
    figures = rl_json(plan) | {"measured": None if run is None else {"run": measured, "begun": run.begun, "draft_acceptance": run.draft_acceptance}}
    return "\n".join([rl_text(plan), *([] if run is None else [_measured_line(str(measured), run, from_run)])]), figures


def _measured_line(folder: str, run: MeasuredRun, lengths: Sequence[str]) -> str:
    """Returns what a plan has from the run in ``folder``. ``lengths``: which of its mean lengths."""
    means = {"prompts": run.prompts.mean, "completions": run.response_tokens}
    said = [f"{name} of {means[name]:,.0f} tokens on average" for name in lengths]
    said += [f"{run.begun:.0%} of the completions' tokens begin as another one of the group does"] if run.begun else []
    said += [f"a draft token is accepted with probability {run.draft_acceptance:.2g}"] if run.draft_acceptance is not None else []
    return f"  measured by '{folder}': {', '.join(said) or 'nothing that is used here'}"


def _check_measured(recipe: Recipe, shapes: ModelShapes, folder: str, lengths: Sequence[str], prompt_tokens: int, response_tokens: int) -> None:
    """Raises ``UserError`` for those of the mean ``lengths`` from the run in ``folder`` that the recipe does not allow."""
    prompts, completions = _longest_means(recipe, shapes)
    for name, flag, value, limit in (("prompts", "prompt", prompt_tokens, prompts), ("completions", "response", response_tokens, completions)):
        if name in lengths and not 1 <= value <= limit:
            raise UserError(
                f"--measured is '{folder}', whose {name} have {value:,} tokens on average; the recipe allows from 1 to {limit:,}: give --{flag}-tokens"
            )


def _longest_means(recipe: Recipe, shapes: ModelShapes) -> tuple[int, int]:
    """Returns the greatest mean lengths of prompts and of completions that the recipe allows."""
    return max(1, sequence_tokens(recipe, shapes) - 1), recipe.rollout.max_tokens


def _lengths(
    recipe: Recipe, shapes: ModelShapes, prompt_tokens: int | None, response_tokens: int | None, response_p95: int | None
) -> tuple[Lengths, Lengths, str]:
    """Returns the lengths of prompts and completions, and which of them are assumed."""
    rollout = recipe.rollout
    most, context = rollout.max_tokens, sequence_tokens(recipe, shapes)
    prompt = prompt_tokens if prompt_tokens is not None else min(USUAL_PROMPT, max(1, (context - most) // 2))
    response = response_tokens if response_tokens is not None else max(1, most // 2)
    prompt_limit, response_limit = _longest_means(recipe, shapes)
    for name, value, limit in (("prompt-tokens", prompt, prompt_limit), ("response-tokens", response, response_limit), ("response-p95", response_p95, 2**31)):
        if value is not None and not 1 <= value <= limit:
            raise UserError(f"--{name} is {value}; it must be from 1 to {limit:,}, which the recipe allows")
    prompts = Lengths.around(prompt, most=context)
    outputs = Lengths.around(response, most=most) if response_p95 is None else Lengths.with_p95(response, response_p95, most)
    given = [
        f"prompts of {prompt:,} tokens on average" if prompt_tokens is None else "", f"completions of {response:,}" if response_tokens is None else "",
        "lognormal lengths" if response_p95 is None else "",
    ]  # fmt: skip
    return prompts, outputs, ", ".join(filter(None, given))


def plan_rl_step(
    recipe: Recipe, scored: Score, prompts: Lengths, outputs: Lengths, assumed: str = "", draft_acceptance: float | None = None,
    alike: Prompts | None = None, begun: float = 0.0,
) -> RLPlan:
    """Returns the predicted step of ``recipe``, with these lengths; without ``draft_acceptance`` as if nothing were drafted. ``alike`` and ``begun``: of
    ``RLStep``. Raises ``UserError`` for an engine that does not fit, and a folder of drafts that cannot be one."""
    rollout, algorithm, shapes, parallel = recipe.rollout, recipe.algorithm, scored.shapes, scored.layout.parallel
    has_critic = algorithm.name == "ppo" and not recipe.has_shared_critic
    has_reward_model = bool(recipe.reward_model.path)
    # Without old log-probabilities, those of all but the first minibatch are compared with the rollout's.
    own_passes = 1.0 if algorithm.old_logprobs == "recompute" else 1 - 1 / algorithm.minibatches
    step = RLStep(
        prompts=rollout.prompts_per_step, group=algorithm.group_size, prompt_lengths=prompts, output_lengths=outputs, training=scored.layout,
        engine=_engine(recipe, shapes, scored.hardware, scored.layout.gpus), engines=_engines(recipe, scored.layout.gpus), budget_tokens=rollout.budget_tokens,
        rounds=algorithm.rounds, passes=own_passes + recipe.has_shared_critic + algorithm.needs_reference + has_critic + has_reward_model,
        trained=1 + has_critic,
        draft_passes=0.0 if recipe.draft is None else draft_passes(shapes, recipe.draft.draft_steps, parallel.tensor * parallel.pipeline),
        minibatches=algorithm.minibatches, epochs=algorithm.epochs, micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        held_bytes=_held(scored), is_ahead=rollout.max_staleness > 0,
        speculation=None if draft_acceptance is None else _speculation(recipe, shapes, draft_acceptance),
        alike=alike, begun=begun, replays_routing=recipe.replays_routing(shapes.experts is not None),
    )  # fmt: skip
    return RLPlan(step, predict_rl_step(shapes, scored.hardware, step), assumed)


def rl_text(plan: RLPlan) -> str:
    return "\n".join(_lines(plan))


def rl_json(plan: RLPlan) -> dict[str, Any]:
    """Returns a step as an object, in seconds."""
    time, step = plan.time, plan.step
    return {
        "step_seconds": time.seconds, **{f"{name}_seconds": getattr(time, name) for name in (*PHASES, "tail")}, "rollout_beside_training": time.is_ahead,
        "longest_tokens": time.longest_tokens, "tokens": time.tokens, "completions": step.prompts * step.group, "engines": step.engines,
        "tensor_parallel_size": step.engine.tensor, "max_num_seqs": step.engine.max_num_seqs, "assumed": plan.assumed,
        "prompt_tokens": step.prompt_lengths.mean, "response_tokens": {"mean": step.output_lengths.mean, "p95": step.output_lengths.quantile(0.95)},
        "budget_tokens": step.budget_tokens, "held_bytes_per_gpu": step.held_bytes, "engine": asdict(step.engine),
        "speculation": None if step.speculation is None else asdict(step.speculation) | {"tokens_a_step": step.speculation.tokens_a_step},
    }  # fmt: skip


def _lines(plan: RLPlan) -> Iterator[str]:
    time, step = plan.time, plan.step
    shares = ", ".join(f"{name.replace('_', ' ')} {getattr(time, name):.3g}" for name in PHASES if getattr(time, name))
    yield f"step of reinforcement learning: {time.seconds:.3g} s ({shares}{'; rollout runs beside training' if time.is_ahead else ''})"
    yield (
        f"  {step.prompts:,} prompts x {step.group}; engines: {step.engines} with {step.engine.tensor} GPUs each; the longest completion has "
        f"{time.longest_tokens:,.0f} tokens, and {time.tail:.3g} s of the rollout are the tail after 9 in 10 have ended"
    )
    if plan.assumed:
        yield f"  assumed, since the recipe does not say: {plan.assumed}"
    if not step.budget_tokens and time.tail > time.rollout / 4:
        yield "  the tail is more than a quarter of the rollout: partial rollouts (rollout.budget_tokens) or rollout.max_staleness 1 would hide it"
    if (drafted := step.speculation) is not None:
        yield (
            f"  drafts: up to {drafted.drafts} tokens for each of up to {drafted.most_sequences} sequences, {drafted.tokens_a_step:.3g} tokens a step if each "
            f"is accepted with probability {drafted.acceptance:g}"
        )
    yield "  rewards, agents and tools are not in it: their time is that of the user's functions"


def _engines(recipe: Recipe, gpus: int) -> int:
    return max(1, gpus // recipe.rollout.engine.tensor_parallel_size)


def _engine(recipe: Recipe, shapes: ModelShapes, hardware: Hardware, gpus: int) -> ServingLayout:
    """Returns the engine of the recipe: in 16 bits on GPUs, unless it quantizes."""
    options = recipe.rollout.engine
    if options.tensor_parallel_size > gpus:
        raise UserError(f"'rollout.engine.tensor_parallel_size' is {options.tensor_parallel_size}, more than the {gpus} GPUs of the plan; give more --gpus")
    layout = ServingLayout(
        options.tensor_parallel_size, "bf16", options.kv_cache_dtype, options.max_num_seqs, options.max_num_batched_tokens,
        max_model_len=min(shapes.max_position_embeddings, options.max_model_len or shapes.default_context),
    )  # fmt: skip
    quantization = (options.quantization or "").removesuffix("+head").replace("w4a8", "int4")
    if quantization in ("fp8", "int8", "int4", "fp16"):
        layout = replace(layout, quantization=quantization)  # type: ignore[arg-type]
    layout.check(shapes, hardware)
    return layout


def _speculation(recipe: Recipe, shapes: ModelShapes, acceptance: float) -> Speculation | None:
    """Returns the speculation of the recipe's engines on GPUs, where each draft token is accepted with the probability ``acceptance``."""
    engine = recipe.rollout.engine
    config = engine.speculative_config
    if config is None:
        return None
    most = config.batch_limit("cuda", engine.max_num_seqs)
    return Speculation(config.draft_tokens, acceptance, engine_draft(recipe, shapes).weights, most, config.adaptive)


def _held(scored: Score) -> int:
    """Returns what the trainer holds on a GPU from one step to the next: weights and the optimizer's state, of the actor."""
    memory = scored.memory
    return memory.parameters + memory.optimizer + memory.master_weights
