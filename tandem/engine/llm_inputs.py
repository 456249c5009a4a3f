"""Converts the arguments of ``LLM.generate``, in each of the forms that vLLM accepts, to one entry per prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engine.lora.request import LoRARequest
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.text.long_text import exceeds
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

PromptInput = str | Mapping[str, Any]


def prompts_of(
    prompts: PromptInput | Sequence[PromptInput], tokenizer: Tokenizer | None, max_tokens: int | None = None
) -> list[tuple[str | None, list[int], str]]:
    """Returns (text, token ids, salt) of every prompt. ``max_tokens``: a text of far more is refused before all of it is encoded. Raises
    ``UserError`` for such a text, and for a prompt in another form."""
    listed: Sequence[PromptInput] = [prompts] if isinstance(prompts, str | Mapping) else prompts
    asked: list[tuple[str | None, list[int], str]] = []
    for prompt in listed:
        given: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(given, Mapping) or not given.keys() & {"prompt", "prompt_token_ids"}:
            raise UserError(f"prompt is {str(prompt)[:60]!r}; give a text or {{'prompt_token_ids': [...]}}")
        unknown = given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise UserError(f"prompt has the key {sorted(unknown)[0]!r}; known are prompt, prompt_token_ids and cache_salt")
        text, salt = given.get("prompt"), str(given.get("cache_salt") or "")
        tokens = given.get("prompt_token_ids")
        if tokens is None:
            if tokenizer is None:
                raise UserError("prompt is a text and this engine has no tokenizer; give {'prompt_token_ids': [...]}")
            if max_tokens is not None and exceeds(tokenizer.encode, str(text), max_tokens):
                raise UserError(f"the prompt has {len(str(text)):,} characters, far more than max_model_len ({max_tokens}) tokens; shorten it")
            tokens = tokenizer.encode(str(text), add_special_tokens=True)
        asked.append((text, [int(token) for token in tokens], salt))
    return asked


def params_of(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Returns the sampling parameters of each prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    check_count("sampling_params", given, count, "give one, or one for each")
    return list(given)


def lora_requests_of(
    given: LoRARequest | Sequence[LoRARequest | None] | None, count: int, max_loras: int
) -> list[LoRARequest | None]:
    """Returns the adapter of each prompt, for an engine that holds ``max_loras`` at once (0: none; the engine itself raises the error)."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    check_count("lora_request", given, count, "give one, or one for each")
    distinct = {request for request in given if request is not None}
    if 0 < max_loras < len(distinct):
        raise UserError(f"generate lora_request has {len(distinct)} adapters; this engine holds {max_loras}: raise max_loras")
    return list(given)


def check_count(name: str, given: Sequence[object] | None, count: int, fix: str = "give one for each") -> None:
    """Raises ``UserError`` unless a list has one entry per prompt."""
    if given is not None and len(given) != count:
        raise UserError(f"generate {name} has {len(given)} entries for {count} prompts; {fix}")
