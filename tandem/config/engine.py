"""``EngineArgs``: every option of the inference engine, for ``LLM``, ``tandem serve``, ``tandem generate`` and section ``rollout.engine``."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tandem.config.arguments import explained
from tandem.config.implementation import Implementation, ImplementationName
from tandem.config.limits import MOST_GIB, MOST_SECONDS
from tandem.config.pooling import Convert, PoolerConfig, Runner, check_overrides
from tandem.config.traces import TracesConfig, TracesProtocol, check_endpoint
from tandem.config.unread import refuse_unread
from tandem.config.vllm_names import ENGINE
from tandem.types.errors import UserError
from tandem.types.kv_cache import KVCacheDtype

AttentionBackend = Literal["auto", "torch", "flash3", "flash4", "xformers"]
QUANTIZATIONS = tuple(name + head for name in ("int8", "fp8", "int4", "w4a8", "nf4", "bf16", "fp16") for head in ("", "+head"))
HEAD_METHODS = ("mtp", "eagle3")
"""Methods of speculation whose draft is a head that reads the model's hidden states."""
MOST_SPEC_FACTOR = 1000.0
MOST_SLOWDOWN = 1000.0
ModelDtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
EnginePrecision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: how draft tokens are proposed, which the model then verifies in one forward pass. Tokens and log-probabilities
    keep their bits."""

    method: Literal["ngram", "suffix", "draft", "mtp", "eagle3"]
    """`draft` proposes tokens with a small model; `ngram` proposes what followed the last few tokens at an earlier occurrence (Saxena,
    2023); `suffix` proposes what followed the longest match in the sequence and in all completions of its prompt, finished and running (SuffixDecoding,
    Oliaro et al., 2024): in a rollout, the group's other answers; `mtp` proposes tokens with the layer of multi-token prediction that the model's folder has
    behind its layers (`num_nextn_predict_layers`; DeepSeek-AI, 2024), which reads the model's hidden states; `eagle3` with an EAGLE-3 head
    (Li et al., 2025), which reads those of three layers."""
    model: str | None = None
    """For `draft`: the folder, or the name on the Hub, of the small model, which has the same vocabulary; for `eagle3`: of the head, in the format of vLLM and
    SpecForge (`LlamaForCausalLMEagle3`)."""
    num_speculative_tokens: int | None = None
    """Maximum number of draft tokens per step. Empty: 4, for `suffix` 24, for `mtp` 1; for more, its layer is applied again to what it has computed."""
    prompt_lookup_max: int = 4
    """For `ngram`: the longest run of tokens to look up."""
    prompt_lookup_min: int = 2
    """For `ngram`: the shortest run of tokens to look up."""
    suffix_decoding_max_cached_requests: int = 10000
    """For `suffix`: completions that are kept for later ones of the same prompt, oldest prompts out first. 0: a request has its own completions only."""
    suffix_decoding_max_spec_factor: float = 1.0
    """For `suffix`: maximum number of draft tokens for each token of the match."""
    suffix_decoding_min_token_prob: float = 0.1
    """For `suffix`: a draft ends where its tokens followed the match in less than this share of the occurrences."""
    adaptive: bool = True
    """Adapt the number of draft tokens of a sequence to its recent acceptance rate."""
    disable_by_batch_size: int | None = None
    """Maximum number of decoding sequences in a step with draft tokens. Empty, and `adaptive`: they are fed where the measured time of steps says that they
    pay, at most with 16 sequences on a CPU and 256 on a GPU; not `adaptive`: with 4 and 64."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "suffix_decoding_max_tree_depth": "matches have no maximum length, and num_speculative_tokens limits the draft",
    }

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"speculative_config {name} is {value}; it must be at least 1")
        if self.suffix_decoding_max_cached_requests < 0:
            raise UserError(f"speculative_config suffix_decoding_max_cached_requests is {self.suffix_decoding_max_cached_requests}; it must be at least 0")
        if not 0 < self.suffix_decoding_max_spec_factor <= MOST_SPEC_FACTOR:
            raise UserError(
                f"speculative_config suffix_decoding_max_spec_factor is {self.suffix_decoding_max_spec_factor}; it must be above 0, at most {MOST_SPEC_FACTOR}"
            )
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise UserError(f"speculative_config suffix_decoding_min_token_prob is {self.suffix_decoding_min_token_prob}; it must be from 0 to 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise UserError(
                f"speculative_config prompt_lookup_min is {self.prompt_lookup_min}; it must be at most prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if self.method == "draft" and self.model is None:
            raise UserError("speculative_config method is 'draft' and no model is given; name the folder of a small model of the same vocabulary")
        if self.method == "eagle3" and self.model is None:
            raise UserError("speculative_config method is 'eagle3' and no model is given; name the folder of an EAGLE-3 head that was trained for this model")
        if self.method not in ("draft", "eagle3") and self.model is not None:
            raise UserError(f"speculative_config model is '{self.model}' and method '{self.method}' uses none; leave it out or choose method 'draft'")
        reason = f"method is '{self.method}'"
        if self.method != "ngram":
            refuse_unread("speculative_config", self, reason, "prompt_lookup_max", "prompt_lookup_min", fix="choose method 'ngram'")
        if self.method != "suffix":
            names = [field.name for field in dataclasses.fields(self) if field.name.startswith("suffix_decoding_")]
            refuse_unread("speculative_config", self, reason, *names, fix="choose method 'suffix'")

    @property
    def draft_tokens(self) -> int:
        """The maximum number of draft tokens of a sequence in a step."""
        return self.num_speculative_tokens or {"suffix": 24, "mtp": 1}.get(self.method, 4)

    @property
    def measures_costs(self) -> bool:
        """Whether the measured time of steps decides how many draft tokens are fed."""
        return self.adaptive and self.disable_by_batch_size is None

    def batch_limit(self, device: str, max_num_seqs: int) -> int:
        """Returns the largest number of decoding sequences in a step that uses draft tokens, on a device of type ``device``; more where the measured
        time of steps decides, which is only as good as the machine is quiet."""
        if self.disable_by_batch_size is not None:
            return self.disable_by_batch_size
        return min(max_num_seqs, (4 if self.measures_costs else 1) * self.default_limit(device))

    def default_limit(self, device: str) -> int:
        """Returns that number where nothing was given or measured."""
        return 4 if device == "cpu" else 64

    @property
    def worth(self) -> float:
        """The acceptance rate of a first draft token below which speculation costs more than it saves. A draft model's token costs a
        forward pass, that of a head one layer, a looked-up one only its place in the target's batch."""
        return 0.4 if self.method == "draft" else 0.25 if self.method in HEAD_METHODS else 0.15


@explained(ENGINE)
@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The options of one engine, with vLLM's names where vLLM has the option."""

    model: str = ""
    """A Hugging Face folder, the name of a model of the Hugging Face Hub (`Qwen/Qwen3-0.6B`, `hf://Qwen/Qwen3-0.6B@REVISION`), or the address of a
    folder in object storage (`s3://bucket/folder`)."""
    revision: str | None = None
    """The branch, tag or commit of a model of the Hub. Empty: that of its name, else `main`."""
    tokenizer: str | None = None
    """A folder with a tokenizer, or a name of the Hub. Empty: the model's own; without one, prompts are token ids."""
    skip_tokenizer_init: bool = False
    """Start without a tokenizer: prompts and completions are token ids."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` reads shapes and tokenizer and initialises random weights."""
    generation_config: str = "auto"
    """Sampling defaults for what a request does not give. `auto`: the model's own `generation_config.json`; `vllm`: none; else a folder with such a
    file."""
    override_generation_config: Mapping[str, Any] | None = None
    """Values that replace those of `generation_config.json`: `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `max_new_tokens`."""
    model_impl: ImplementationName = "auto"
    """Who computes the model. `auto` and `tandem`: Tandem's own network, for the families that it declares. `transformers`: the module of transformers, for
    any other decoder that it has, with the engine's attention, KV cache and products; slower, in one process."""
    trust_remote_code: bool = False
    """With `transformers`: run the code in the model's folder if its class is not in transformers. It can do anything on this machine."""
    runner: Runner = "auto"
    """`generate`: the engine generates text; `pooling`: it embeds or scores texts; `auto`: what the model's folder is for."""
    convert: Convert = "auto"
    """What an engine that pools makes of a text: `embed` a vector, also of a model that generates text; `classify` a score; `none`: what the class in
    `config.json` computes; `auto`: what the folder is for."""
    pooler_config: PoolerConfig | None = None
    """How it makes them, where the folder does not say it: `pooling_type` (`LAST` or `MEAN`), `use_activation`, `dimensions`."""
    hf_overrides: Mapping[str, Any] | None = None
    """Keys of `config.json` on pooling: `classifier_from_token` (the tokens of no and yes by which a model for reranking scores a pair),
    `is_original_qwen3_reranker`, `is_matryoshka`, `matryoshka_dimensions`, `architectures`."""
    verify: bool = False
    """Compare every byte of the model with the digests in its `manifest.json`, or with those of its download, before it is used."""
    download_dir: str | None = None
    """Cache folder for downloaded models. Empty: `~/.cache/tandem/weights` for object storage, the Hub's own cache (`HF_HOME`) for its models."""
    weight_cache_gib: float = 0.0
    """Maximum size of that cache in GiB. 0: no limit."""
    dtype: ModelDtype = "float32"
    """Dtype of weights and activations: `float32`, `float64`, `bfloat16` or `float16`; `auto` is `float32`."""
    precision: EnginePrecision = "fp32"
    """Precision of linear layers over fp32 weights: `fp32`, `bf16`, `fp16` or `fp8`, as `trainer.precision`, whose bits the engine then has. `bf16` packs
    weights in bf16 and uses the dot products of a CPU that has them (`avx512_bf16`); in the same bits, slower, on one that has not."""
    quantization: str | None = None
    """Quantize unquantized weights as they are loaded, including later updates: `int8`, `fp8`, `int4`, `w4a8`, `nf4`, `bf16` or `fp16`; with `+head` the
    output head as well. A quantized folder is recognised without this option."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    kernels: Literal["auto", "cpu", "reference", "triton"] = "auto"
    """`auto` selects the C++ kernels for fp32 on a CPU with a compiler, Triton's on a GPU, else plain torch (`reference`)."""
    attention: AttentionBackend = "auto"
    """Attention over whole prompts: `auto` is the engine's own kernels; `torch`, `flash3`, `flash4` and `xformers` are those packages'
    kernels, on a GPU in 16 bits. Decoding and continued prompts always use the engine's paged attention."""
    deterministic: bool = True
    """Every bit of a token depends only on its prefix, the weights and the request, not on other requests in the batch. Options that break
    this are refused."""
    seed: int = 0
    """Seed of requests without a seed of their own."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and completion together. Empty: the model's context."""
    max_num_seqs: int = 256
    """Maximum number of sequences that decode at once."""
    max_num_batched_tokens: int = 4096
    """Maximum number of tokens computed in one step."""
    max_prefill_slowdown: float | None = None
    """With chunked prefill: how many times as long a step may take with tokens of prompts as its decoding sequences take alone. The engine measures
    both and limits the chunks. With 2, running sequences keep half of their speed while a long prompt is computed. Empty: only
    `max_num_batched_tokens` limits them, which is best for throughput. `tandem serve` sets it to 1.7."""
    batching: Literal["static", "dynamic", "continuous"] = "continuous"
    """Which sequences may join a running batch. `static`: none, and a batch keeps its rows and blocks until its last sequence ends;
    `dynamic`: none, but a sequence that ends frees them; `continuous`: any, as soon as there is room."""
    enable_chunked_prefill: bool = True
    """With `continuous` batching: split prompts into chunks that fit the token budget of a step."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of common prompt prefixes."""
    cache_implementation: Literal["paged", "static"] = "paged"
    """`paged`: a sequence allocates KV blocks as it grows. `static`: it reserves `max_model_len` contiguous tokens when it is admitted, and
    prefixes are not reused."""
    kv_cache_tokens: int = 0
    """Size of the KV cache in tokens. 0: what `max_num_seqs` sequences can fill, at most 1 GiB; in a pod, what one step of rollouts can
    fill."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory for weights, activations and KV cache; the cache takes what the others leave. Empty: the size is
    `kv_cache_tokens`. It has no effect on a CPU, for which programs written for vLLM give it too."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Dtype of keys and values: `auto` (the model's dtype), `bfloat16`, or with a scale for each token and head 8 bits, `int8` or
    `fp8_e4m3`, or 4, `int4`. In a pod the trainer rounds its keys and values in the same way, so rollout and trainer still agree bit for bit."""
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    """How a preempted sequence is resumed: `swap` copies its blocks to host memory as far as `swap_space` allows, `recompute` drops them,
    `auto` selects the cheaper."""
    swap_space: float = 0.0
    """Host memory for the keys and values of swapped-out sequences, in GiB, for all tensor-parallel ranks together. Of a model with linear attention half of it
    is for states."""
    watermark: float = 0.01
    """Share of the KV blocks that an admission leaves free while other sequences run."""
    tensor_parallel_size: int = 1
    """Number of processes that each hold a shard of the model."""
    rank_timeout_s: float = 120.0
    """Seconds without an answer from a tensor-parallel rank after which the engine is terminated."""
    enable_lora: bool = False
    """Allow requests to name a LoRA adapter."""
    max_loras: int = 1
    """Maximum number of adapters loaded at once."""
    max_lora_rank: int = 16
    """Maximum rank of an adapter."""
    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding; a section of its own, below. Empty: off."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the device computes the previous one. Empty: on a GPU."""
    enforce_eager: bool = False
    """Disable CUDA graphs for decoding steps."""
    otlp_traces_endpoint: str | None = None
    """Send the spans of requests to this OpenTelemetry collector, for example `http://127.0.0.1:4318`. Empty: none. Needs the extra `traces`."""
    otlp_traces_protocol: TracesProtocol = "http/protobuf"
    """The protocol of that address: `http/protobuf` or `grpc`."""

    @property
    def traces(self) -> TracesConfig | None:
        """Where the spans of requests are sent; ``None``: there are none. Raises ``UserError`` for an address that is none."""
        if self.otlp_traces_endpoint is None:
            return None
        check_endpoint("engine otlp_traces_endpoint", self.otlp_traces_endpoint)
        return TracesConfig(self.otlp_traces_endpoint, self.otlp_traces_protocol)

    @property
    def implemented_by(self) -> Implementation:
        """Who computes the model."""
        return Implementation(self.model_impl, self.trust_remote_code)

    @property
    def finds_prefixes(self) -> bool:
        """Whether prompts reuse cached blocks. Contiguous reservations share none."""
        return self.enable_prefix_caching and self.cache_implementation == "paged"

    @property
    def admission(self) -> Literal["static", "dynamic", "continuous", "chunked"]:
        """The admission mode: ``batching``, or ``chunked`` if prompts are split too."""
        return "chunked" if self.batching == "continuous" and self.enable_chunked_prefill else self.batching

    def check(self) -> None:
        """Raises ``UserError`` for a value that is invalid for any model."""
        lowest = {
            "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_loras": 1, "max_lora_rank": 1, "kv_cache_tokens": 0, "tensor_parallel_size": 1,
        }  # fmt: skip
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise UserError(f"engine {name} is {getattr(self, name)}; it must be at least {low}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise UserError(f"engine quantization is '{self.quantization}'; it must be one of {', '.join(QUANTIZATIONS)}")
        if self.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise UserError(f"engine device is '{self.device}'; it must be 'cpu', 'cuda' or 'cuda:N'")
        for name in ("swap_space", "weight_cache_gib"):
            if not 0 <= getattr(self, name) <= MOST_GIB:
                raise UserError(f"engine {name} is {getattr(self, name)}; it must be 0 or more GiB, at most {MOST_GIB}")
        if not 0 < self.rank_timeout_s <= MOST_SECONDS:
            raise UserError(f"engine rank_timeout_s is {self.rank_timeout_s}; it must be above 0 seconds, at most {MOST_SECONDS}")
        if not 0 <= self.watermark < 1:
            raise UserError(f"engine watermark is {self.watermark}; it must be a share of the blocks, from 0 to below 1")
        if self.preemption_mode == "swap" and not self.swap_space:
            raise UserError("engine preemption_mode is 'swap' and there is no swap space; raise swap_space or choose 'recompute'")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"engine max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs ({self.max_num_seqs}), one token for "
                "each sequence"
            )
        self._check_slowdown()
        self._check_pooling()
        self._check_implementation()
        if self.speculative_config is not None:
            self.speculative_config.check()
            if self.speculative_config.draft_tokens >= self.max_num_batched_tokens:
                raise UserError(
                    f"speculative_config num_speculative_tokens is {self.speculative_config.draft_tokens}; a step verifies them with the token "
                    f"before them, so it must be below max_num_batched_tokens ({self.max_num_batched_tokens})"
                )
        self._check_async_scheduling()
        self._check_memory()
        if self.traces is None:
            refuse_unread("engine", self, "engine.otlp_traces_endpoint is empty", "otlp_traces_protocol", fix="set engine.otlp_traces_endpoint")
        if self.attention != "auto" and (self.device == "cpu" or self.dtype not in ("bfloat16", "float16")):
            raise UserError(
                f"engine attention is '{self.attention}', which needs a GPU and 16 bits, and device is '{self.device}' with dtype '{self.dtype}'; set "
                "attention to auto"
            )
        if self.precision != "fp32" and self.dtype not in ("auto", "float32"):
            raise UserError(
                f"engine precision is '{self.precision}', which computes over fp32 weights, and dtype is '{self.dtype}'; leave one of them out"
            )
        if self.max_model_len is not None:
            self.check_length(self.max_model_len)
        if not self.enable_lora:
            refuse_unread("engine", self, "engine.enable_lora is false", "max_loras", "max_lora_rank", fix="set engine.enable_lora to true")
        if self.preemption_mode == "recompute":
            reason = "engine.preemption_mode is 'recompute', which swaps nothing out"
            refuse_unread("engine", self, reason, "swap_space", fix="set engine.preemption_mode to auto or swap")

    def _check_pooling(self) -> None:
        if self.hf_overrides is not None:
            check_overrides(self.hf_overrides)
        if self.runner == "generate":
            refuse_unread("engine", self, "engine.runner is 'generate'", "convert", "pooler_config", "hf_overrides", fix="set runner to pooling")
        if self.pooler_config is not None:
            self.pooler_config.check()
        if self.runner == "pooling" and self.speculative_config is not None:
            raise UserError("engine runner is 'pooling', which draws no tokens, and speculative_config is given; leave it out")

    def _check_implementation(self) -> None:
        if self.model_impl != "transformers":
            reason = f"engine.model_impl is '{self.model_impl}', which runs no code of a model's folder"
            refuse_unread("engine", self, reason, "trust_remote_code", fix="set model_impl to transformers")
            return
        if self.tensor_parallel_size != 1:
            size = self.tensor_parallel_size
            raise UserError(f"engine tensor_parallel_size is {size} and model_impl 'transformers', which computes whole models; leave it out")
        if self.runner == "pooling":
            raise UserError("engine runner is 'pooling' and model_impl 'transformers', which computes models that generate text; leave it out")

    def _check_slowdown(self) -> None:
        slowdown = self.max_prefill_slowdown
        if slowdown is None:
            return
        if not 1 < slowdown <= MOST_SLOWDOWN:
            raise UserError(f"engine max_prefill_slowdown is {slowdown}; it must be above 1, at most {MOST_SLOWDOWN}, or be left out")
        if self.admission != "chunked":
            raise UserError(f"engine max_prefill_slowdown is {slowdown}, and whole prompts are computed in one step; leave it out, or enable chunked prefill")

    def _check_memory(self) -> None:
        share = self.gpu_memory_utilization
        if share is None:
            return
        if not 0 < share <= 1:
            raise UserError(f"engine gpu_memory_utilization is {share}; it must be above 0 and at most 1")
        if self.kv_cache_tokens and self.device != "cpu":
            raise UserError(
                f"engine gpu_memory_utilization is {share} and kv_cache_tokens {self.kv_cache_tokens}, and each sets the size of the KV cache; leave one "
                "of them out"
            )

    def _check_async_scheduling(self) -> None:
        if not self.async_scheduling:
            return
        if self.speculative_config is not None:
            raise UserError("engine async_scheduling is on and speculation needs each token before the next step; leave one of them out")
        if self.tensor_parallel_size > 1:
            raise UserError("engine async_scheduling is on and tensor-parallel ranks follow each step; leave it out or set tensor_parallel_size to 1")

    def check_length(self, max_model_len: int) -> None:
        """Raises ``UserError`` if sequences of ``max_model_len`` tokens cannot be served."""
        if max_model_len < 2:
            raise UserError(f"engine max_model_len is {max_model_len}; it must be at least 2")
        if self.admission != "chunked" and self.max_num_batched_tokens < max_model_len:
            raise UserError(
                f"engine max_num_batched_tokens is {self.max_num_batched_tokens}; without chunked prefill it must be at least max_model_len "
                f"({max_model_len})"
            )
