"""Tasks of EleutherAI's lm-evaluation-harness (Gao et al., 2024) with the engine as its model. Needs the extra ``evaluate``."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.evaluation.perplexity import score
from tandem.types import UserError

if TYPE_CHECKING:
    Base: Any = object
else:
    try:
        from lm_eval.api.model import TemplateLM as Base
    except ImportError:
        Base = None

MISSING = "lm-eval is not installed; install it with: pip install 'tandem-rl[evaluate]'"


def is_installed() -> bool:
    return Base is not None


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One figure of one task: ``metric`` by its name in the harness (``acc``, ``exact_match``), with its standard error where it has one."""

    task: str
    metric: str
    value: float
    standard_error: float | None


def run_tasks(llm: LLM, tasks: Sequence[str], folder: Path | None = None, limit: int | None = None, few_shot: int | None = None) -> list[TaskScore]:
    """``tasks`` by name, from the harness's own or from the YAML files in ``folder``; at most ``limit`` samples of each. Raises
    ``UserError`` where the harness is not installed or has no such task."""
    if Base is None:
        raise UserError(MISSING)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Reading the harness's own thousands of tasks takes seconds: only where the folder does not have them all.
    manager = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise UserError(f"lm-eval has no task '{unknown[0]}'; 'lm-eval ls tasks' lists its own, --tasks-folder names a folder of others")
    model: Any = engine_model(llm)
    try:
        # Without bootstrap: errors that have a closed form are given, others cost minutes.
        results = simple_evaluate(
            model, tasks=list(tasks), num_fewshot=few_shot, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=0
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"the data of lm-eval's {', '.join(tasks)} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    assert results is not None
    return [
        TaskScore(task, name.partition(",")[0], float(value), _error_of(figures, name))
        for task, figures in results["results"].items()
        for name, value in figures.items()
        if isinstance(value, int | float) and "_stderr" not in name and "," in name
    ]


def _error_of(figures: dict[str, Any], name: str) -> float | None:
    metric, _, rest = name.partition(",")
    error = figures.get(f"{metric}_stderr,{rest}")
    return float(error) if isinstance(error, int | float) else None


def engine_model(llm: LLM) -> Any:
    """``llm`` as the harness's model."""
    if Base is None:
        raise UserError(MISSING)
    return EngineModel(llm)


class EngineModel(Base or object):  # type: ignore[misc]
    """Answers the harness's three kinds of request with the engine: log-likelihoods of continuations, of whole texts, and greedy or
    sampled generation until a stop string."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm, self._tokenizer = llm, llm.get_tokenizer()
        self._longest = llm.engine.settings.max_model_len
        if not self._tokenizer.eos_token_ids:
            raise UserError("the model's tokenizer names no end-of-sequence token, which lm-eval needs; set eos_token in its tokenizer_config.json")

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before a text without a context."""
        return self.eot_token_id if self._tokenizer.bos_token_id is None else self._tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Special tokens are added where the caller leaves it open, as the model was trained with them."""
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        # Contexts that are too long lose their beginning, as in the harness's own models.
        rows = [(seen[-(self._longest - len(counted)) :], counted) for _, seen, counted in requests]
        return score(self._llm, rows)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._longest - 1, 1)
            totals.append(sum(value for value, _ in score(self._llm, [make_disjoint_window(window) for window in windows])))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            text, asked = request.args
            until = asked.get("until") or []
            tokens = min(int(asked.get("max_gen_toks", 256)), self._longest - 1)
            temperature = float(asked.get("temperature", 0.0)) if asked.get("do_sample") else 0.0
            prompts.append({"prompt_token_ids": self.tok_encode(text)[-(self._longest - tokens) :]})
            params.append(SamplingParams(temperature=temperature, max_tokens=tokens, stop=[until] if isinstance(until, str) else list(until)))
        return [output.outputs[0].text for output in self._llm.generate(prompts, params, use_tqdm=False)]
