"""Offline inference with vLLM's names: ``LLM(model).generate(prompts, SamplingParams(...))``."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tandem.engine.engine import FIRST_VERSION, Engine
from tandem.engine.executor.load import LoadFormat, check_quantization, load_decoder
from tandem.engine.executor.ranks import Ranks, RankSettings
from tandem.engine.kv_cache.block_table import blocks_for
from tandem.engine.llm_inputs import PromptInput, check_count, lora_requests_of, params_of, prompts_of
from tandem.engine.llm_start import cache_blocks, check_device, check_ranks, dtype_of, tokenizer_of
from tandem.engine.lora.request import LoRARequest
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.speculative import speculative_settings
from tandem.kernels import KernelChoice
from tandem.model.huggingface import read_shapes
from tandem.model.weight_store import HeldModel, WeightStore, is_remote
from tandem.text.chat import apply_chat_template
from tandem.text.continuation import cut_at_mark, mark_end
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion
from tandem.types.kv_cache import KVCacheDtype, check_kv_cache_dtype

DUMMY_VERSION = WeightVersion(-1, -1)
"""The version of random weights: what ``load_format="dummy"`` starts with."""

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate. As a context manager it is closed at the end.

    ``model``: a Hugging Face folder, or the address of one in object storage (``s3://bucket/folder``), which is kept in the
    weight cache ``download_dir`` (``None``: ``~/.cache/tandem/weights``) of at most ``weight_cache_bytes`` (0: no limit).
    ``max_model_len``: tokens of prompt and completion together; ``None`` takes the model's own context.
    ``kv_cache_tokens``: size of the KV cache; 0 takes what ``max_num_seqs`` sequences can fill, but not more
    than 1 GiB (and never less than one sequence). ``kv_cache_dtype``: ``auto`` (the model's), ``bfloat16``, ``int8`` or
    ``fp8_e4m3``. ``max_num_batched_tokens``: tokens that one step computes at most,
    in one forward pass. ``load_format="dummy"`` reads shapes and tokenizer but no weights. ``tokenizer``: a folder, a
    ``Tokenizer``, or ``None`` for the model's own (without one, prompts are token ids). ``seed``: of requests that
    bring none. ``enable_lora``: requests may have adapters, of which ``max_loras`` are held at once, each of a rank up to
    ``max_lora_rank``. ``quantization``: int8, fp8, int4, bf16 or fp16 rounds plain matrices on arrival, those of later
    updates too (``int8+head``: the output head as well); a quantised folder is found out by itself.

    ``tensor_parallel_size``: ranks that hold a part of the model each; this process is the first, the others are started
    and end with it, or with ``close``. ``deterministic``: cut so that every bit is that of one rank alone (with the compiled
    kernels), and refuse what else would change bits; else with fewer exchanges. A rank that is silent for ``rank_deadline_s``
    ends the engine. ``digest_weights``: keep digests of the weights in ``engine.weight_digests``.

    ``batching``, ``kv``, ``preemption``, ``watermark``, ``overlap`` and ``cuda_graphs``: see ``EngineSettings``. ``swap_tokens``: tokens whose keys and values
    host memory holds of sequences that are swapped out. ``speculative``: how tokens are guessed, as vLLM's
    ``speculative_config``: ``{"method": "ngram"}`` or ``{"method": "draft", "model": folder}`` and what else
    ``SpeculativeSettings`` has. """

    def __init__(
        self, model: str | Path, *, tokenizer: str | Path | Tokenizer | None = None, skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype = "float32", device: str = "cpu", seed: int = 0, max_model_len: int | None = None,
        kv_cache_tokens: int = 0, max_num_seqs: int = 256, max_num_batched_tokens: int = 4096,
        enable_prefix_caching: bool = True, enable_chunked_prefill: bool = True,
        load_format: LoadFormat = "auto", kernels: KernelChoice = "auto", kv_cache_dtype: KVCacheDtype = "auto",
        weight_version: WeightVersion | None = None, download_dir: str | Path | None = None, weight_cache_bytes: int = 0,
        tensor_parallel_size: int = 1, deterministic: bool = True, rank_deadline_s: float = 120.0,
        enable_lora: bool = False, max_loras: int = 1, max_lora_rank: int = 16, digest_weights: bool = False,
        quantization: str | None = None,
        batching: str = "chunked", kv: str = "paged", preemption: str = "auto", swap_tokens: int = 0, watermark: float = 0.01,
        speculative: Mapping[str, Any] | None = None, overlap: str = "auto", cuda_graphs: str = "auto",
    ) -> None:
        if load_format not in ("auto", "dummy"):
            raise UserError(f"engine load_format is {load_format!r}; it must be 'auto' or 'dummy'")
        check_kv_cache_dtype(kv_cache_dtype)
        torch_dtype = dtype_of(dtype)
        check_device(device)
        guessing = None if speculative is None else speculative_settings(speculative)
        self._held: HeldModel | None = None
        if is_remote(model):
            store = WeightStore(download_dir, weight_cache_bytes, _show_download if sys.stderr.isatty() else None)
            self._held = store.hold(str(model))
            model = self._held.path
        shapes = read_shapes(model)
        check_ranks(shapes, tensor_parallel_size, deterministic, rank_deadline_s, device)
        check_quantization(model, quantization, tensor_parallel_size, deterministic)
        length = shapes.max_position_embeddings if max_model_len is None else max_model_len
        settings = EngineSettings(
            max_model_len=length,
            num_blocks=cache_blocks(shapes, torch_dtype, kv_cache_dtype, kv_cache_tokens, length, max_num_seqs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            seed=seed,
            max_loras=max_loras if enable_lora else 0,
            max_lora_rank=max_lora_rank,
            kv_cache_dtype=kv_cache_dtype,
            batching=batching,
            kv=kv,
            preemption=preemption,
            swap_blocks=blocks_for(swap_tokens),
            watermark=watermark,
            deterministic=deterministic,
            overlap=overlap,
            cuda_graphs=cuda_graphs,
        )
        settings.check(shapes.max_position_embeddings)
        found = None if skip_tokenizer_init else tokenizer_of(tokenizer, model)
        if found is not None and found.vocab_size > shapes.vocab_size:
            raise UserError(f"the tokenizer has {found.vocab_size} tokens and '{model}' {shapes.vocab_size}; they do not belong together")
        ranks = None
        if tensor_parallel_size > 1:
            ranks = Ranks(
                RankSettings(
                    str(model), kernels, str(torch_dtype).removeprefix("torch."), device, load_format, seed, tensor_parallel_size,
                    deterministic, rank_deadline_s, quantization,
                )
            )
            decoder = ranks.decoder
        else:
            decoder = load_decoder(
                model, kernels, torch_dtype, torch.device(device), load_format, seed, pack=not digest_weights, quantization=quantization,
                deterministic=deterministic,
            )
        if weight_version is None:
            weight_version = DUMMY_VERSION if load_format == "dummy" else FIRST_VERSION
        draft = None
        if guessing is not None and guessing.model is not None:
            draft = load_decoder(guessing.model, kernels, torch_dtype, decoder.embed_tokens.device, "auto", seed, deterministic=deterministic)
        self._engine: Engine | None = Engine(decoder, settings, found, weight_version, ranks, digest_weights, guessing, draft)
        self._tokenizer_folder = Path(model if tokenizer is None or isinstance(tokenizer, Tokenizer) else tokenizer)
        self._requests = 0

    @property
    def engine(self) -> Engine:
        """The engine behind it. Raises ``RunError`` once it is closed."""
        if self._engine is None:
            raise RunError("this LLM is closed; make another one")
        return self._engine

    def close(self) -> None:
        """End the other ranks, and give back the weights, the KV cache and the model's folder in the weight cache. Closing twice is no
        error."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ``UserError`` where there is none."""
        if self.engine.tokenizer is None:
            raise UserError("this engine has no tokenizer; give one, or token ids")
        return self.engine.tokenizer

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
        request_keys: Sequence[int] | None = None, priority: Sequence[int] | None = None, num_draft_tokens: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """One answer for each prompt, in order.

        A prompt is a text, or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``, with ``cache_salt`` where its
        cached blocks must not be shared. ``request_keys[i]``, with the seed, fixes the random numbers of prompt i;
        without it the key is the prompt's place in this call where its parameters have a seed, else its place among
        all this engine has seen. ``use_tqdm`` shows the progress on a terminal; ``on_progress`` is called with the
        completed and the asked number of prompts whenever one is completed. ``lora_request``: the adapter of all prompts,
        or one for each; it is loaded where it is not, and again where its folder has changed. ``num_draft_tokens``: guesses
        in one step at most (0: none; ``None``: what the engine was told). Raises ``UserError`` before any work. """
        asked = prompts_of(prompts, self.engine.tokenizer)
        params = params_of(sampling_params, len(asked))
        check_count("request_keys", request_keys, len(asked))
        check_count("priority", priority, len(asked))
        if self.engine.is_paused:
            raise UserError("the engine is paused; call engine.resume() before generate")
        for (_, tokens, _), own in zip(asked, params, strict=True):
            if own.is_streamed:
                raise UserError(f"sampling output_kind is {own.output_kind.name}; generate answers whole, leave it at FINAL_ONLY")
            self.engine.check_request(tokens, own)
        adapters = lora_requests_of(lora_request, len(asked), self.engine.settings.max_loras)
        names = []
        try:
            for i, ((text, tokens, salt), own) in enumerate(zip(asked, params, strict=True)):
                key = i if own.seed is not None else self._requests
                name = str(self._requests)
                self._requests += 1
                self.engine.add_request(
                    name, tokens, own, prompt=text, key=key if request_keys is None else request_keys[i],
                    priority=0 if priority is None else priority[i], cache_salt=salt, lora_request=adapters[i],
                    num_draft_tokens=num_draft_tokens,
                )
                names.append(name)
            return self._run(names, on_progress or (_show if use_tqdm and sys.stderr.isatty() else None))
        except BaseException:
            for name in names:
                self.engine.abort(name)
            raise

    def chat(
        self, messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
        chat_template: str | None = None, add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation, or for each of several: see ``chat_prompt``, whose ``template`` and
        ``variables`` are ``chat_template`` and ``chat_template_kwargs`` here, as in vLLM."""
        several = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                cast("Messages", conversation), template=chat_template, tools=tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm, on_progress=on_progress)

    def chat_prompt(
        self, messages: Messages, *, add_generation_prompt: bool = True, continue_final_message: bool = False, **options: Any
    ) -> PromptInput:
        """The prompt that ``messages`` (each with ``role`` and ``content``) become by the chat template of the tokenizer's
        folder. With ``continue_final_message`` it ends where the last message does, so that the model goes on with that;
        the other ``options`` are those of ``tandem.text.chat.apply_chat_template``."""
        tokenizer = self.get_tokenizer()
        if continue_final_message and add_generation_prompt:
            raise UserError("continue_final_message and add_generation_prompt exclude each other; set the second to False")
        shown = mark_end(messages) if continue_final_message else messages
        text = apply_chat_template(self._tokenizer_folder, shown, add_generation_prompt=add_generation_prompt, **options)
        text = cut_at_mark(text) if continue_final_message else text
        # Special tokens are the template's business.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text)}

    def _run(self, names: list[str], on_progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        answers: dict[str, RequestOutput | None] = dict.fromkeys(names)
        missing = len(names)
        while missing:
            found = [output for output in self.engine.step() if output.request_id in answers]
            answers.update((output.request_id, output) for output in found)
            missing -= len(found)
            if found and on_progress is not None:
                on_progress(len(names) - missing, len(names))
        return [output for output in answers.values() if output is not None]

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> WeightVersion:
        return self.engine.weight_version

    def update_weights(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: WeightVersion,
        draft_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Replace all weights, given by Hugging Face names. See ``Engine.update_weights``."""
        given = draft_tensors.items() if isinstance(draft_tensors, Mapping) else draft_tensors
        self.engine.update_weights(tensors.items() if isinstance(tensors, Mapping) else tensors, version, given)

    def update_weights_from(self, source: WeightSource, version: WeightVersion) -> Updated:
        """Replace all weights by the published ``version``. See ``Engine.update_weights_from``."""
        return self.engine.update_weights_from(source, version)


def _show(done: int, asked: int) -> None:
    end = "\n" if done == asked else ""
    print(f"\rgenerated {done} of {asked}", end=end, file=sys.stderr, flush=True)


def _show_download(here: int, total: int) -> None:
    width = 30 * here // max(total, 1)
    bar = "=" * width + " " * (30 - width)
    end = "\n" if here == total else ""
    print(f"\rdownloading [{bar}] {here / 2**20:.0f} of {total / 2**20:.0f} MiB", end=end, file=sys.stderr, flush=True)
