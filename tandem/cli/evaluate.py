"""Measure a model: on a task's held-out prompts, by the perplexity of a text, or on tasks of lm-eval.

MODEL is a Hugging Face folder (of a run: runs/NAME/model) or a model of the Hugging Face Hub (OWNER/NAME). The task and the
reward functions come from a recipe (of a run: runs/NAME/config.yaml), or from --task with the task's own reward. Keys of the
recipe can be set as in tandem train. --task perplexity reads --data; --task lm-eval:NAME[,NAME] runs tasks of
lm-evaluation-harness (pip install 'tandem-rl[evaluate]').

examples:
  tandem evaluate runs/sort/model --recipe runs/sort/config.yaml
  tandem evaluate runs/sort/model --task sort --greedy --prompts 1024
  tandem evaluate runs/sort/model --task reasoning_gym:chain_sum --json
  tandem evaluate runs/pretrain/model --task perplexity --data held-out.jsonl
  tandem evaluate MODEL --task lm-eval:arc_easy --limit 200
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tandem.cli.engine_options import add_implementation, implementation, local_model
from tandem.types import Prompt, Sample, UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--task", help="sort, addition, reasoning_gym:DATASET, perplexity or lm-eval:NAME; programs and a dataset of your own need --recipe")
    parser.add_argument("--recipe", help="a YAML recipe whose task, rewards and rollout sections are used, and of model its max_length and implementation")
    parser.add_argument("--prompts", type=int, default=1024, help="number of prompts, the ones of a run's final evaluation (default: 1024)")
    parser.add_argument("--greedy", action="store_true", help="decode greedily instead of sampling at temperature 1")
    parser.add_argument("--max-tokens", type=int, help="maximum number of new tokens (default: the recipe's, or 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="perplexity: a text file, or JSON lines with one document each")
    parser.add_argument("--text-key", default="text", help="perplexity: the key of the text in a JSON line")
    parser.add_argument("--context", type=int, default=0, help="perplexity: tokens per window (default: the model's context)")
    parser.add_argument("--stride", type=int, default=0, help="perplexity: tokens from the start of a window to the next (default: a window less one)")
    parser.add_argument("--tasks-folder", help="lm-eval: a folder with YAML files of additional tasks")
    parser.add_argument("--limit", type=int, help="perplexity: number of documents to read; lm-eval: maximum number of samples per task")
    parser.add_argument("--few-shot", type=int, help="lm-eval: examples before each question (default: the task's)")
    add_implementation(parser)
    parser.add_argument("--verify", action="store_true", help="compare the model with the digests in its manifest.json first")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    options.model = local_model(options.model)
    if options.recipe is None and options.task is not None and (options.task == "perplexity" or options.task.startswith("lm-eval:")):
        from tandem.cli.evaluate_text import run_text

        return run_text(options)
    if options.limit is not None:
        raise UserError("--limit is for --task perplexity and lm-eval:NAME; --prompts is the number of prompts of a task")
    if options.data is not None:
        raise UserError("--data is for --task perplexity; the data of a task is set in its recipe")
    from tandem.engine.llm import LLM
    from tandem.evaluation.tasks import evaluate
    from tandem.jobs.checks.check_answers import check_agent_columns, check_answers, check_columns, check_episodes
    from tandem.jobs.checks.check_counts import check_prompts
    from tandem.pod.prompts import prompt_source
    from tandem.rl.agents.in_flight import Agents, InFlightAgents
    from tandem.rl.rewards.pool import RewardPool
    from tandem.rl.rollout.dispatch import evaluation_settings, request_key
    from tandem.rl.rollout.episode_tools import EpisodeTools
    from tandem.rl.rollout.episodes import InFlightEpisodes
    from tandem.rl.rollout.groups import samples_of, sampling_params
    from tandem.runtime.machine.available_memory import available_bytes

    if options.prompts < 1:
        raise UserError(f"--prompts is {options.prompts}; it must be at least 1")
    recipe = _recipe(options)
    settings = evaluation_settings(recipe.rollout, options.seed, greedy=options.greedy, purpose="evaluate")
    with ExitStack() as stack:
        source = stack.enter_context(closing(prompt_source(recipe, Path(options.model))))
        rewards = stack.enter_context(RewardPool(recipe.rewards))
        check_answers(source, recipe.rewards)
        check_episodes(source, recipe.rollout.agent is not None)
        check_columns(source.task.train_prompt(0).columns, rewards.columns)
        check_prompts("--prompts", options.prompts, recipe.rollout, available_bytes(recipe.machine.memory_gib), source.task.size)
        prompts = source.fresh(options.prompts)
        llm = LLM(
            options.model, kernels=recipe.machine.kernels, verify=options.verify, model_impl=recipe.model.implementation,
            trust_remote_code=recipe.model.trust_remote_code, max_model_len=recipe.model.max_length or None,
        )  # fmt: skip

        tools = None
        if recipe.rollout.multi_turn is not None:
            tools = EpisodeTools.open(recipe.rollout.multi_turn, recipe.task.tools, Path(options.model))
            stack.callback(tools.pool.close)
        agents = None
        if recipe.rollout.agent is not None:
            agents = Agents(recipe.rollout.agent, Path(options.model))
            stack.callback(agents.close)
            check_agent_columns(prompts[0].columns, recipe.rollout.agent.function, agents.pool.columns)

        def generate(asked: Sequence[Prompt]) -> list[Sample]:
            episodes: InFlightEpisodes | InFlightAgents | None = None
            if tools is not None:
                episodes = InFlightEpisodes(llm.engine, tools)
            elif agents is not None:
                episodes = InFlightAgents(llm.engine, agents, llm.engine.settings.max_model_len)
            if episodes is not None:
                episodes.add(0, asked, settings)
                return episodes.draw("all", lambda done, total: None)
            keys = [request_key(0, prompt.id, settings["purpose"]) for prompt in asked]
            tokens = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in asked]
            return samples_of(0, asked, llm.generate(tokens, sampling_params(settings), request_keys=keys))

        result = evaluate(generate, prompts, rewards.score)
    kind = "greedy" if options.greedy else "sampled"
    if options.json:
        print(json.dumps({"kind": kind, **result.to_json()}, ensure_ascii=False))
    else:
        print(f"{kind} accuracy {result.accuracy:.4f} +- {result.standard_error:.4f} on {result.count} prompts")
        print(f"mean reward {result.mean_reward:.4f}; {result.faults} samples could not be scored")
    return 0


def _recipe(options: argparse.Namespace) -> Any:
    from tandem.config.implementation import Implementation
    from tandem.config.load import apply_overrides, build, read_yaml
    from tandem.config.recipe import Recipe

    if (options.task is None) == (options.recipe is None):
        raise UserError("give either --task or --recipe; for example --task sort")
    data = read_yaml(options.recipe) if options.recipe else {"task": {"name": options.task}}
    # The model that a run has written is computed as in the run.
    own = data["model"] if isinstance(data.get("model"), dict) else {}
    data["model"] = {"path": options.model, **{key: own[key] for key in ("max_length", "implementation", "trust_remote_code") if key in own}}
    if options.model_impl is not None or options.trust_remote_code:
        named = Implementation(data["model"].get("implementation", "auto"), data["model"].get("trust_remote_code", False))
        data["model"]["implementation"], data["model"]["trust_remote_code"] = implementation(options, named)
    data.pop("sft", None)
    overrides = list(options.overrides)
    if options.max_tokens is not None:
        overrides.append(f"rollout.max_tokens={options.max_tokens}")
    return build(Recipe, apply_overrides(data, overrides))
