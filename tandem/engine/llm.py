"""Offline inference with vLLM's names: ``LLM(model).generate(prompts, SamplingParams(...))``."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor

from tandem.config.arguments import NotHere
from tandem.config.engine import EngineArgs
from tandem.config.lora import LoraConfig
from tandem.config.vllm_names import METHODS
from tandem.engine.engine import DUMMY_VERSION, FIRST_VERSION, Engine
from tandem.engine.executor.load import check_quantization, load_decoder
from tandem.engine.executor.ranks import Ranks, RankSettings
from tandem.engine.llm_inputs import PromptInput, check_count, lora_requests_of, params_of, prompts_of
from tandem.engine.llm_options import EngineOptions, whole_signature
from tandem.engine.llm_start import check_device, check_ranks, dtype_of, engine_args, tell_of_long_frequencies, tokenizer_of
from tandem.engine.llm_traces import TracedCalls, open_exporter
from tandem.engine.lora.request import LoRARequest
from tandem.engine.model_limits import check_vocabulary
from tandem.engine.pooling.llm_pooling import GivenParams, LoRARequests, Run, as_list, classified, embedded, encoded, params_for, scored
from tandem.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tandem.engine.pooling.params import PoolingParams, PoolingTask
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import check_completions, resolve
from tandem.engine.spec_decode.draft_size import draft_size
from tandem.engine.spec_decode.eagle3_draft import load_eagle3_draft
from tandem.engine.spec_decode.state_proposer import DraftHead
from tandem.model.decoder import Decoder
from tandem.model.huggingface.generation_config import default_sampling
from tandem.model.huggingface.model_config import Heads
from tandem.model.huggingface.model_folder import read_shapes
from tandem.model.huggingface.pooling_config import read_pooling
from tandem.model.model_source import find_model, hold_model
from tandem.model.multi_token import load_predictor
from tandem.runtime.machine.heap import freed_memory_kept, give_back
from tandem.text.chat import apply_chat_template
from tandem.text.continuation import cut_at_mark, mark_end
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion

"""The version of random weights: what ``load_format="dummy"`` starts with."""

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model for offline generation, with vLLM's interface.

    As a context manager it closes itself::

        with LLM("runs/sort/model", max_num_seqs=64) as llm:
            outputs = llm.generate(["3142="], SamplingParams(temperature=0, max_tokens=16))
            answers = llm.chat([{"role": "user", "content": "Who are you?"}])
    """

    def __init__(
        self, model: str | Path, *, tokenizer: str | Path | Tokenizer | None = None, weight_version: WeightVersion | None = None,
        digest_weights: bool = False, trained_lora: LoraConfig | None = None, **options: Unpack[EngineOptions],
    ) -> None:
        """Loads ``model``, a Hugging Face folder or the address of one in object storage.

        Args:
            tokenizer: A folder, a ``Tokenizer``, or ``None`` for the model's own. Without one, prompts are token ids.
            weight_version: What the engine calls these weights; by default ``FIRST_VERSION``, or ``DUMMY_VERSION`` for random ones.
            digest_weights: Keep digests of the weights in ``engine.weight_digests``.
            trained_lora: ``trainer.lora`` of the trainer: the model gets its adapter, which changes nothing before the first update; updates then hold
                the adapter alone. Adapters of requests are those of ``enable_lora``.
            options: Every other field of ``tandem.EngineArgs``, for example ``max_num_seqs=64``; ``tandem serve --help`` describes them. ``None``
                is the default, ``dtype`` may be a ``torch.dtype`` and ``speculative_config`` a mapping. ``gpu_memory_utilization`` has no effect
                on a CPU. With ``otlp_traces_endpoint`` each request that is generated is the span ``llm_request`` with ``queue``, ``prefill`` and
                ``decode``.

        Raises:
            UserError: An option that is unknown or cannot work, before the weights are read.
        """
        args = engine_args(model, tokenizer, options)
        exporter = open_exporter(args.traces)
        self._traces = None if exporter is None else TracedCalls(exporter)
        self._engine: Engine | None = None
        try:
            self._load(args, tokenizer, weight_version, digest_weights, trained_lora)
        except BaseException:
            if self._traces is not None:
                self._traces.close()
            raise

    def _load(
        self, args: EngineArgs, tokenizer: str | Path | Tokenizer | None, weight_version: WeightVersion | None, digest_weights: bool,
        trained_lora: LoraConfig | None,
    ) -> None:
        """Loads the model; the arguments are those of the constructor."""
        dtype = dtype_of(args)
        check_device(args.device)
        self._held = hold_model(
            args.model, revision=args.revision, download_dir=args.download_dir, weight_cache_gib=args.weight_cache_gib, verify=args.verify
        )
        folder = self._held.path
        model_pooling = read_pooling(folder, args)
        heads: Heads = "language" if model_pooling is None else model_pooling.heads
        shapes = read_shapes(folder, heads, args.implemented_by)
        if model_pooling is not None and args.speculative_config is not None:
            raise UserError("speculative_config is given and the model embeds or scores texts, which draws no tokens; leave it out")
        check_ranks(shapes, args)
        check_quantization(folder, args.quantization, args.tensor_parallel_size, args.deterministic)
        draft_memory = draft_size(args.speculative_config, folder, shapes, str(dtype).removeprefix("torch."), args.tensor_parallel_size > 1)
        settings = resolve(args, shapes, dtype, draft_memory)
        tell_of_long_frequencies(shapes, settings.max_model_len)
        self.sampling_defaults = default_sampling(folder, args.generation_config, args.override_generation_config)
        self._tokenizer_folder = folder if args.tokenizer is None else find_model(args.tokenizer, "tokenizer")
        given_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) or args.tokenizer is None else self._tokenizer_folder
        own_tokenizer = None if args.skip_tokenizer_init else tokenizer_of(given_tokenizer, folder)
        if own_tokenizer is not None:
            check_vocabulary(own_tokenizer, folder, shapes)
        ranks = None
        if args.tensor_parallel_size > 1:
            ranks = Ranks(
                RankSettings(
                    str(folder), args.kernels, str(dtype).removeprefix("torch."), args.device, args.load_format, args.seed, args.tensor_parallel_size,
                    args.deterministic, args.rank_timeout_s, args.quantization, args.attention, args.precision, trained_lora,
                    heads, settings.max_model_len,
                )
            )
            decoder = ranks.decoder
        else:
            decoder = load_decoder(
                folder, args.kernels, dtype, torch.device(args.device), args.load_format, args.seed, pack=not digest_weights,
                quantization=args.quantization, deterministic=args.deterministic, attention=args.attention, precision=args.precision, lora=trained_lora,
                heads=heads, implemented_by=args.implemented_by,
            )
        if weight_version is None:
            weight_version = DUMMY_VERSION if args.load_format == "dummy" else FIRST_VERSION
        speculative = args.speculative_config
        draft: Decoder | DraftHead | None = None
        if speculative is not None and speculative.method == "mtp":
            draft = load_predictor(folder, decoder)
        elif speculative is not None and speculative.method == "eagle3":
            draft = load_eagle3_draft(find_model(str(speculative.model)), folder, decoder)
        elif speculative is not None and speculative.model is not None:
            draft = load_decoder(
                find_model(speculative.model), args.kernels, dtype, decoder.embed_tokens.device, "auto", args.seed, deterministic=args.deterministic
            )
        self._engine = Engine(decoder, settings, own_tokenizer, weight_version, ranks, digest_weights, speculative, draft, model_pooling)
        self._requests = 0

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **more: Any) -> "LLM":
        """Returns an ``LLM`` with the options of ``args``; ``more`` are the arguments of ``LLM`` that are no fields of ``EngineArgs``."""
        given = {field.name: getattr(args, field.name) for field in fields(EngineArgs)}
        return cls(given.pop("model"), **given, **more)

    @property
    def engine(self) -> Engine:
        """The engine. Raises ``RunError`` once the ``LLM`` is closed."""
        if self._engine is None:
            raise RunError("this LLM is closed; create a new one")
        return self._engine

    def close(self) -> None:
        """Stops the other ranks, and frees the weights, the KV cache and the model's folder in the weight cache. May be called twice."""
        if self._engine is not None:
            self._engine.close()
            if self._traces is not None:
                self._traces.close()
        self._engine = None
        self._held.release()
        give_back()

    if not TYPE_CHECKING:
        # A type checker that saw it would accept every name.
        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise NotHere(f"LLM has no '{name}': {METHODS[name]}")
            raise AttributeError(f"'LLM' object has no attribute {name!r}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ``UserError`` if there is none."""
        if self.engine.tokenizer is None:
            raise UserError("this engine has no tokenizer; give one, or token ids")
        return self.engine.tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer and of its chat template."""
        return self._tokenizer_folder

    @property
    def model_folder(self) -> Path:
        """The folder of the model."""
        return self._held.path

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of prompts without their own: vLLM's defaults, and over them the model's ``generation_config.json``, as the
        options ``generation_config`` and ``override_generation_config`` say."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
        request_keys: Sequence[int] | None = None, priority: Sequence[int] | None = None, num_draft_tokens: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Returns the output of each prompt, in order.

        Args:
            prompts: Texts, or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``; with ``cache_salt`` for a prompt whose cached blocks
                are shared only with prompts of the same salt.
            sampling_params: The settings of all prompts, or of each. ``None``: those of ``get_default_sampling_params``.
            use_tqdm: Whether the progress is shown on a terminal.
            request_keys: Keys of the prompts' random numbers, together with the seed. By default the key is the prompt's index in this
                call if its parameters have a seed, else its index among all requests of this engine.
            priority: Lower values are scheduled first.
            num_draft_tokens: Maximum number of draft tokens in one step (0: none; ``None``: as the engine's options say).
            on_progress: Called with the numbers of completed and of all prompts after each completion.
            lora_request: The adapter of all prompts, or of each; loaded if it is not, and again if its folder has changed.

        Raises:
            UserError: An argument is invalid, before anything is computed.
        """
        given = [sampling_params] if sampling_params is None or isinstance(sampling_params, SamplingParams) else sampling_params
        is_cut = any(own is not None and own.truncate_prompt_tokens is not None for own in given)
        asked = prompts_of(prompts, self.engine.tokenizer, None if is_cut else self.engine.settings.max_model_len)
        params = params_of(self.get_default_sampling_params() if sampling_params is None else sampling_params, len(asked))
        check_count("request_keys", request_keys, len(asked))
        check_count("priority", priority, len(asked))
        if self.engine.is_paused:
            raise UserError("the engine is paused; call engine.resume() before generate")
        for (_, tokens, _), own in zip(asked, params, strict=True):
            if own.is_streamed and own.output_kind is not None:
                raise UserError(f"sampling output_kind is {own.output_kind.name}; generate answers whole, leave it at FINAL_ONLY")
            self.engine.check_request(tokens, own)
        check_completions(sum(own.n for own in params))
        adapters = lora_requests_of(lora_request, len(asked), self.engine.settings.max_loras)

        def add(i: int, name: str) -> None:
            (text, tokens, salt), own = asked[i], params[i]
            key = i if own.seed is not None else int(name)
            self.engine.add_request(
                name, tokens, own, prompt=text, key=key if request_keys is None else request_keys[i], priority=0 if priority is None else priority[i],
                cache_salt=salt, lora_request=adapters[i], num_draft_tokens=num_draft_tokens,
            )
            if self._traces is not None:
                self._traces.added(name, len(tokens), own)

        return self._compute(len(asked), add, on_progress or (_show if use_tqdm and sys.stderr.isatty() else None))

    def chat(
        self, messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
        chat_template: str | None = None, add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: Callable[[int, int], None] | None = None, lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generates a message for one conversation, or for each of several.

        Args:
            messages: A conversation, or several: each a list of messages with ``role`` and ``content``.
            chat_template: A template, instead of that of the tokenizer's folder.
            tools: The functions that the model may call, in OpenAI's form, for the template.
            chat_template_kwargs: Further variables of the template, such as ``enable_thinking``.

        The other arguments are those of ``generate`` and ``chat_prompt``.
        """
        several = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                cast("Messages", conversation), template=chat_template, tools=tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm, on_progress=on_progress, lora_request=lora_request)

    def chat_prompt(
        self, messages: Messages, *, add_generation_prompt: bool = True, continue_final_message: bool = False, **options: Any
    ) -> PromptInput:
        """Renders ``messages`` (each with ``role`` and ``content``) with the chat template of the tokenizer's folder.

        With ``continue_final_message`` the prompt ends with the last message, so that the model continues it. The other ``options`` are those
        of ``tandem.text.chat.apply_chat_template``.
        """
        tokenizer = self.get_tokenizer()
        if continue_final_message and add_generation_prompt:
            raise UserError("continue_final_message and add_generation_prompt exclude each other; set the second to False")
        shown = mark_end(messages) if continue_final_message else messages
        text = apply_chat_template(self._tokenizer_folder, shown, add_generation_prompt=add_generation_prompt, **options)
        text = cut_at_mark(text) if continue_final_message else text
        # The template has rendered the special tokens already.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text)}

    def _compute(self, count: int, add: Callable[[int, str], None], on_progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        """Returns the outputs of ``count`` requests, in order; ``add(i, name)`` adds request i. None is left in the engine if it fails."""
        names = []
        try:
            for i in range(count):
                name = str(self._requests)
                self._requests += 1
                add(i, name)
                names.append(name)
            # Short calls follow each other, and would return memory only to ask for it again.
            with freed_memory_kept(gives_back=False):
                return self._run(names, on_progress)
        except BaseException:
            for name in names:
                self.engine.abort(name)
                if self._traces is not None:
                    self._traces.dropped(name)
            raise

    def _run(self, names: list[str], on_progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        answers: dict[str, RequestOutput | None] = dict.fromkeys(names)
        missing = len(names)
        while missing:
            outputs = [output for output in self.engine.step() if output.request_id in answers]
            answers.update((output.request_id, output) for output in outputs)
            missing -= len(outputs)
            if self._traces is not None:
                for output in outputs:
                    self._traces.ended(output)
            if outputs and on_progress is not None:
                on_progress(len(names) - missing, len(names))
        return [output for output in answers.values() if output is not None]

    # -- embeddings and scores -----------------------------------------------------------------------------------------

    def encode(
        self, prompts: PromptInput | Sequence[PromptInput], pooling_params: GivenParams = None, *, use_tqdm: bool = True,
        lora_request: LoRARequests = None, pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns what a model that embeds or scores texts makes of each prompt, as fp32 tensors in ``outputs.data``: a vector [D], a score [1], or one
        for each token, [T, D] or [T, 1].

        Args:
            prompts: As of ``generate``; a text gets the tokenizer's special tokens.
            pooling_params: The parameters of all prompts, or of each.
            pooling_task: ``embed``, ``classify``, ``token_embed`` or ``token_classify``; ``None``: what the model does.
            use_tqdm, lora_request: As of ``generate``.

        Raises:
            UserError: An argument is invalid, or the model generates text, before anything is computed.
        """
        asked = as_list(prompts)
        return encoded(self._pooled(use_tqdm, lora_request), asked, params_for(pooling_params, len(asked), pooling_task))

    def embed(
        self, prompts: PromptInput | Sequence[PromptInput], *, use_tqdm: bool = True, pooling_params: GivenParams = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the vector of each prompt, in ``outputs.embedding``. The arguments are those of ``encode``."""
        asked = as_list(prompts)
        return embedded(self._pooled(use_tqdm, lora_request), asked, params_for(pooling_params, len(asked), "embed"))

    def classify(
        self, prompts: PromptInput | Sequence[PromptInput], *, use_tqdm: bool = True, pooling_params: GivenParams = None,
        lora_request: LoRARequests = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the score of each prompt, in ``outputs.probs``. The arguments are those of ``encode``."""
        asked = as_list(prompts)
        return classified(self._pooled(use_tqdm, lora_request), asked, params_for(pooling_params, len(asked), "classify"))

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *, use_tqdm: bool = True, pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None, chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns how well texts belong together, in ``outputs.score``: the score of a model that reads both, else the cosine similarity of their vectors.

        Args:
            data_1: One text, which is paired with each of ``data_2``, or as many as those.
            data_2: A text or several.
            chat_template: The template of a pair, whose messages have the roles ``query`` and ``document``.
            use_tqdm, pooling_params, lora_request: As of ``encode``.

        Raises:
            UserError: As ``encode``.
        """
        run = self._pooled(use_tqdm, lora_request)
        return scored(run, self.engine, self._tokenizer_folder, as_list(data_1), as_list(data_2), pooling_params, chat_template)

    def _pooled(self, use_tqdm: bool, lora_request: LoRARequests) -> Run:
        """Returns what computes pooling requests."""

        def run(prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[RequestOutput]:
            engine = self.engine
            asked = prompts_of(prompts, engine.tokenizer, engine.settings.max_model_len)
            if engine.is_paused:
                raise UserError("the engine is paused; call engine.resume() first")
            for (_, tokens, _), own in zip(asked, params, strict=True):
                engine.check_request(tokens, own)
            adapters = lora_requests_of(lora_request, len(asked), engine.settings.max_loras)

            def add(i: int, name: str) -> None:
                text, tokens, salt = asked[i]
                engine.add_request(name, tokens, params[i], prompt=text, cache_salt=salt, lora_request=adapters[i])

            return self._compute(len(asked), add, _show if use_tqdm and sys.stderr.isatty() else None)

        return run

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> WeightVersion:
        return self.engine.weight_version

    def update_weights(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: WeightVersion,
        draft_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Replaces all weights, given by Hugging Face names. See ``Engine.update_weights``."""
        given = draft_tensors.items() if isinstance(draft_tensors, Mapping) else draft_tensors
        self.engine.update_weights(tensors.items() if isinstance(tensors, Mapping) else tensors, version, given)

    def update_weights_from(self, source: WeightSource, version: WeightVersion) -> Updated:
        """Replaces all weights by the published ``version``. See ``Engine.update_weights_from``."""
        return self.engine.update_weights_from(source, version)


LLM.__signature__ = whole_signature(LLM.__init__)  # type: ignore[attr-defined]


def _show(done: int, asked: int) -> None:
    end = "\n" if done == asked else ""
    print(f"\rgenerated {done} of {asked}", end=end, file=sys.stderr, flush=True)
