"""Draws groups of samples from a server of vLLM: token ids in, token ids out, a request for each sample.

The seed of a sample depends on the run's seed, its request and its index, as in Tandem's engine, and not on the worker. The bits of vLLM's logits depend on
which other samples are in a batch, so that a sample which is drawn again may differ all the same.
"""

import ast
import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from tandem.backends.vllm.arguments import BOTH_LOGPROBS, MODEL_NAME, version_label
from tandem.backends.vllm.http_client import VllmClient
from tandem.rl.rollout.dispatch import request_key, sample_id
from tandem.text.tokenizer import Tokenizer
from tandem.types import EngineDied, FinishReason, Prompt, RoutedExperts, Sample, WeightVersion

ABORT_POLL_S = 0.1
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The settings that leave tokens out, and their values when they are off."""


def seed_of(seed: int, key: int, index: int) -> int:
    """Returns the 32-bit seed of sample ``index`` of request ``key``: as many bits as a generator of torch takes on a CPU."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{key}\0{index}".encode(), digest_size=4).digest(), "little")


def is_processed(settings: Mapping[str, Any]) -> bool:
    """Returns whether tokens are drawn from another distribution than the model's: two log-probabilities are recorded then. A greedy token has the model's
    alone."""
    return settings["temperature"] not in (0, 1) or any(settings[name] != off for name, off in FILTERS.items())


def generate_request(
    prompt: Prompt, index: int, key: int, settings: Mapping[str, Any], stop_token_ids: Sequence[int], room: int
) -> dict[str, Any]:
    """Returns the body of ``/inference/v1/generate`` for one sample. ``stop_token_ids``: our tokenizer's, so that no file of the model's folder decides what
    ends a sample. ``room``: tokens that are left in the context."""
    return {
        "model": MODEL_NAME,
        "token_ids": list(prompt.token_ids),
        "sampling_params": {
            "n": 1,
            **{name: settings[name] for name in FILTERS},
            "temperature": settings["temperature"],
            "seed": seed_of(settings["seed"], key, index),
            "max_tokens": min(settings["max_tokens"], room),
            "ignore_eos": True,
            "stop_token_ids": list(stop_token_ids),
            "stop": list(settings["stop"]),
            "detokenize": bool(settings["stop"]),
            "logprobs": BOTH_LOGPROBS if is_processed(settings) else 0,
        },
    }


def sample_of_answer(
    step: int, prompt: Prompt, index: int, answer: Mapping[str, Any], tokenizer: Tokenizer, settings: Mapping[str, Any], version: WeightVersion,
    replays: bool = False,
) -> Sample:
    """Returns the sample that the answer of ``/inference/v1/generate`` for ``settings`` has. Raises ``EngineDied`` if a token was drawn by other weights than
    ``version``, or the answer is not whole. ``replays``: it has the routing of the tokens."""
    (choice,) = answer["choices"]
    tokens, reason = tuple(choice["token_ids"]), choice["finish_reason"]
    name = sample_id(step, prompt.id, index)
    sampling, logprobs = _logprobs(choice["logprobs"]["content"] or (), is_processed(settings))
    if len(logprobs) != len(tokens) or reason not in ("stop", "length"):
        raise EngineDied(f"vLLM answered sample '{name}' with {len(tokens)} tokens, {len(logprobs)} log-probabilities and finish reason '{reason}'")
    label = version_label(version)
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
    if spans != [(label, 0, len(tokens))]:
        raise EngineDied(f"vLLM drew sample '{name}' with the weights {spans}, and holds {label}")
    routed = routing_of(choice["routed_experts"], len(prompt.token_ids) + len(tokens) - 1) if replays else None
    return Sample(
        id=name, prompt_id=prompt.id, index=index, prompt_token_ids=prompt.token_ids, token_ids=tokens, logprobs=logprobs, sampling_logprobs=sampling,
        weight_versions=(version,) * len(tokens), finish_reason=FinishReason(reason),
        text=text_of_answer(tokens, choice["stop_reason"], tokenizer, settings["stop"]),
        routed_experts=routed,
    )  # fmt: skip


def _logprobs(content: Sequence[Mapping[str, Any]], is_both: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the log-probabilities of the tokens of an answer in the distribution that they were drawn from, and raw ones, which differ if ``is_both``. Raises
    ``EngineDied`` if those are missing."""
    sampling = tuple(float(each["logprob"]) for each in content)
    if not is_both:
        return sampling, sampling
    entries = [each["top_logprobs"] for each in content]
    if any(len(each) != BOTH_LOGPROBS for each in entries):
        raise EngineDied("vLLM answered without the raw log-probabilities of the tokens that it drew")
    return sampling, tuple(float(raw["logprob"]) for _, raw in entries)


def routing_of(text: str | None, tokens: int) -> RoutedExperts:
    """Returns the routing of ``tokens`` tokens from an answer: an array [tokens, layers, experts per token] in NumPy's format, in base64. Raises
    ``EngineDied`` if it is another."""
    data = base64.b64decode(text or "")
    # NumPy's format, version 1.0: magic, version, the length of the header, and the header, a literal of Python.
    start = 10 + int.from_bytes(data[8:10], "little")
    header = ast.literal_eval(data[10:start].decode("latin-1").strip() or "{}")
    item_bytes, shape = {"|u1": 1, "<u2": 2}.get(header.get("descr"), 0), header.get("shape", ())
    if not item_bytes or header["fortran_order"] or len(shape) != 3 or shape[0] != tokens or len(data) - start != math.prod(shape) * item_bytes:
        raise EngineDied(f"vLLM answered with the routing {header or 'of nothing'} for {tokens} tokens")
    return RoutedExperts(shape[1], shape[2], item_bytes, data[start:])


def text_of_answer(tokens: Sequence[int], stop_reason: object, tokenizer: Tokenizer, stops: Sequence[str]) -> str:
    """Returns the text of ``tokens`` as Tandem's engine has it, cut at the stop text if there is one."""
    text = tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])
    return text[: text.find(stop_reason)] if isinstance(stop_reason, str) and stop_reason in stops and stop_reason in text else text


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    step: int
    waiting: int
    drawn: list[Sample] = field(default_factory=list)


class VllmGroups:
    """The groups that a server draws; the calls are those of ``InFlightGroups``. ``version``: of the weights that the server holds. ``most``: requests at
    once. ``replays``: samples that are trained have the routing of their tokens."""

    def __init__(
        self, client: VllmClient, tokenizer: Tokenizer, version: WeightVersion, *, max_model_len: int, most: int, replays: bool = False,
    ) -> None:
        self._client, self._tokenizer, self._version = client, tokenizer, version
        self._max_model_len, self._replays = max_model_len, replays
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="vllm")
        self._finished: SimpleQueue[tuple[_Group, Sample | BaseException]] = SimpleQueue()
        self._groups: list[_Group] = []
        self._requests: list[Future[None]] = []
        self._waiting = 0

    def add(self, step: int, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
        """Sends the requests of a group of ``settings["n"]`` samples for each of ``prompts``, in this order."""
        for prompt in prompts:
            group = _Group(prompt, step, settings["n"])
            self._groups.append(group)
            self._waiting += group.waiting
            for index in range(group.waiting):
                self._requests.append(self._pool.submit(self._draw, group, index, dict(settings)))

    def _draw(self, group: _Group, index: int, settings: Mapping[str, Any]) -> None:
        prompt = group.prompt
        try:
            key = request_key(group.step, prompt.id, settings["purpose"])
            room = self._max_model_len - len(prompt.token_ids)
            body = generate_request(prompt, index, key, settings, self._tokenizer.eos_token_ids, room)
            replays = self._replays and settings["purpose"] == "rollout"
            answer = self._client.post("/inference/v1/generate", body)
            sample = sample_of_answer(group.step, prompt, index, answer, self._tokenizer, settings, self._version, replays)
        except BaseException as error:
            self._finished.put((group, error))
        else:
            self._finished.put((group, sample))

    def draw(
        self, wait: Literal["any", "all"], on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample]:
        """Waits until any group, or all of them, are drawn; returns their samples in the order in which the groups were added. Calls ``on_progress`` with the
        numbers of groups drawn and asked for, and ``on_samples`` with samples that are finished. Raises ``EngineDied``."""
        total = len(self._groups)
        while self._waiting and (wait == "all" or all(group.waiting for group in self._groups)):
            samples, is_group = list[Sample](), False
            for group, result in self._next():
                self._waiting -= 1
                if isinstance(result, BaseException):
                    raise result
                group.waiting -= 1
                group.drawn.append(result)
                samples.append(result)
                is_group = is_group or not group.waiting
            if on_samples is not None:
                on_samples(samples)
            if is_group:
                on_progress(sum(not group.waiting for group in self._groups), total)
        drawn, self._groups = [group for group in self._groups if not group.waiting], [group for group in self._groups if group.waiting]
        return [sample for group in drawn for sample in sorted(group.drawn, key=lambda sample: sample.index)]

    def _next(self) -> list[tuple[_Group, Sample | BaseException]]:
        """Waits for a result and returns all that are there."""
        results = [self._finished.get()]
        while True:
            try:
                results.append(self._finished.get_nowait())
            except Empty:
                return results

    def drop(self) -> None:
        """Aborts what is unfinished and ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        while any(not request.done() for request in self._requests):
            # Again and again, because a request may arrive just after an abort.
            self._client.post("/abort_requests")
            wait_for(self._requests, timeout=ABORT_POLL_S)
        self._groups.clear()
