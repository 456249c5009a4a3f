"""The inference engine: takes requests and returns outputs, one step at a time."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core.components import make_components
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.core.integrity import sequences_of
from tandem.engine.core.lifecycle import State, Transition
from tandem.engine.core.published_weights import PublishedWeights
from tandem.engine.core.scheduler import PauseMode
from tandem.engine.core.staging import Staging
from tandem.engine.core.weight_updates import replace_weights
from tandem.engine.executor.rank_weights import StagedWeights
from tandem.engine.executor.ranks import Ranks
from tandem.engine.kv_cache.block_events import BlockEvents
from tandem.engine.kv_cache.block_exchange import BlockExchange, kv_layout
from tandem.engine.kv_cache.kv_cache_manager import DUMMY_VERSION, FIRST_VERSION
from tandem.engine.lora.request import LoRARequest
from tandem.engine.metrics.stats import CumulativeStats, EngineStats
from tandem.engine.metrics.stats_logger import StatsLogger, counts_of, engine_stats
from tandem.engine.pooling.params import PoolingParams
from tandem.engine.pooling.pooler import Pooler
from tandem.engine.processing.input_processor import InputProcessor
from tandem.engine.processing.output_processor import OutputProcessor
from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.state_proposer import DraftHead
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.model.weight_digests import weight_digests
from tandem.runtime.machine.heap import give_back
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion

NO_TOKENS = SamplingParams(temperature=0, max_tokens=1)
"""The parameters of requests that draw no tokens."""
GENERATES = "this engine generates text and pools nothing; start it with runner 'pooling', and convert 'embed' for embeddings by a model that generates text"


class Engine:
    """Continuous batching over one decoder. Not thread-safe: one owner adds, steps, aborts and updates.

    Args:
        decoder: The model; with ``ranks``, the shard of rank 0. The engine packs it if it is not packed, and owns it.
        tokenizer: ``None``: outputs have no text, and only lengths and ``stop_token_ids`` end a completion.
        ranks: The other ranks of a tensor-parallel engine.
        digest_weights: Whether each set of weights is digested before it is packed (not with ``ranks``).
        speculative: How draft tokens are proposed; ``None``: not at all.
        draft: The draft model of speculative method ``draft``, or the head of one that reads hidden states.
        model_pooling: How the model embeds or scores texts; ``None``: it generates text.

    Raises:
        UserError: Settings that contradict each other or do not fit the model.
    """

    def __init__(
        self, decoder: Decoder, settings: EngineSettings, tokenizer: Tokenizer | None = None,
        version: WeightVersion = FIRST_VERSION, ranks: Ranks | None = None, digest_weights: bool = False,
        speculative: SpeculativeConfig | None = None, draft: Decoder | DraftHead | None = None, model_pooling: ModelPooling | None = None,
    ) -> None:
        settings.check(decoder.shapes.max_position_embeddings)
        decoder.use_context(settings.max_model_len)
        self.settings = settings
        self.tokenizer = tokenizer
        self.decoder = decoder
        self._digest_weights = digest_weights and ranks is None
        self.weight_digests = weight_digests(decoder) if self._digest_weights else {}
        if not decoder.is_packed:
            decoder.pack()
        self._ranks = ranks
        self.pooler = None if model_pooling is None else Pooler(decoder, model_pooling, tokenizer)
        self._components = make_components(decoder, settings, version, ranks, speculative, draft, self.pooler)
        self._scheduler, self._runner = self._components.scheduler, self._components.runner
        self._published = PublishedWeights(self._components, self._digest_weights)
        self._adapters = self._runner.adapters
        self._logger = StatsLogger()
        self._inputs = InputProcessor(settings, tokenizer, decoder.shapes.vocab_size, speculative)
        self._outputs = OutputProcessor(self._scheduler, self._runner, tokenizer, self._logger)
        self._core = EngineCore(self._components, settings, self._outputs, self._logger)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams | PoolingParams, *, prompt: str | None = None,
        key: int | None = None, first_index: int = 0, priority: int = 0, cache_salt: str = "",
        lora_request: LoRARequest | None = None, num_draft_tokens: int | None = None, continues: Continuation | None = None,
    ) -> None:
        """Queues a request.

        Args:
            request_id: Unique among unfinished requests.
            params: How tokens are drawn, or, for a model that embeds or scores texts, what is wanted of it.
            key: Key of the request's random numbers; ``None``: the number of requests added before it.
            first_index: Index of its first completion in the random numbers.
            priority: Lower values are scheduled first.
            cache_salt: Prefix-cache entries are shared only between requests with the same salt.
            lora_request: Its adapter, which is loaded if it is not, and again if its folder has changed.
            num_draft_tokens: Maximum number of draft tokens in one step (0: none; ``None``: as the engine's options say).
            continues: The tokens that its one completion has already; its output has them too, and ``max_tokens`` counts them. With the key and
                index of the request that drew them, the next tokens are those that it would have drawn.

        Raises:
            UserError: The request cannot be served; nothing is queued.
        """
        pooling = self._resolved(params)
        request = self._inputs.request(
            request_id, prompt_token_ids, NO_TOKENS if isinstance(params, PoolingParams) else params, prompt=prompt, key=key, first_index=first_index,
            priority=priority, cache_salt=cache_salt, adapter=lora_request.lora_name if lora_request is not None else "",
            num_draft_tokens=num_draft_tokens, pooling=pooling,
            reads_all_states=pooling is not None and self.pooler is not None and self.pooler.reads_all_states(pooling),
        )
        if request_id in self._outputs.request_states:
            raise UserError(f"request id {request_id!r} is in use; give every request an id of its own")
        if continues is not None:
            self._inputs.check_continuation(request, continues)
        if lora_request is not None and not self._adapters.is_current(lora_request):
            self.add_lora(lora_request)
        sequences = self._inputs.start(request, continues)
        self._outputs.add_request(request, sequences)
        self._scheduler.add_group(sequences, is_scored=request.params.prompt_logprobs is not None)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | PoolingParams) -> None:
        """Raises ``UserError`` for a request that this engine cannot serve."""
        self._resolved(params)
        if isinstance(params, PoolingParams):
            self._inputs.check(prompt_token_ids, NO_TOKENS, draws=False)
        else:
            self._inputs.check(prompt_token_ids, params)

    def _resolved(self, params: SamplingParams | PoolingParams) -> PoolingParams | None:
        """Returns what a request pools. Raises ``UserError`` for one that this engine's model cannot serve."""
        if isinstance(params, PoolingParams):
            if self.pooler is None:
                raise UserError(GENERATES)
            return self.pooler.resolve(params)
        if self.pooler is not None:
            does = "embeds texts" if self.pooler.model_pooling.scored_by is None else "scores texts"
            raise UserError(f"this engine {does} and generates none; start it with runner 'generate', if the model has a language-model head")
        return None

    def abort(self, request_id: str) -> bool:
        """Aborts a request. Its output, with the tokens so far, is returned by the next step. Returns False if there is no such unfinished
        request."""
        self._core.synchronize()
        state = self._outputs.request_states.get(request_id)
        if state is not None:
            self._core.abort(state)
        return state is not None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to compute or to return."""
        return bool(self._outputs.request_states) or self.has_outputs

    @property
    def request_ids(self) -> list[str]:
        """Ids of the unfinished requests."""
        return list(self._outputs.request_states)

    @property
    def has_outputs(self) -> bool:
        """Whether ``take_outputs`` has something to return."""
        return self._outputs.has_outputs

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Computes one step. Returns the outputs of finished requests, and the new part of those that are streamed. Raises ``RunError`` if
        the engine is asleep, or has no complete set of weights after a failed update; ``EngineDied`` if shared memory that it computes with was written
        to."""
        if not self.decoder.is_packed:
            raise RunError("the engine has no complete set of weights since an update failed; update the weights again")
        if self.is_sleeping:
            raise RunError("the engine is asleep; wake it up before its next step")
        if self._scheduler.pause in (None, PauseMode.WAIT):
            self._core.step()
            # Before anything that was computed leaves the engine.
            self._published.check_shared()
        return self._outputs.take_outputs()

    def listen(self, on_completion: Callable[[str, CompletionOutput], None] | None) -> None:
        """Calls ``on_completion`` with the request's id and each completion that finishes, before the others of its request have; ``None``: no longer."""
        self._outputs.on_completion = on_completion

    def take_outputs(self) -> list[RequestOutput]:
        """Returns outputs that need no computation: those of aborted requests."""
        return self._outputs.take_outputs()

    # -- weights and adapters ------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> ModelShapes:
        return self.decoder.shapes

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.dtype

    @property
    def weight_version(self) -> WeightVersion:
        return self._scheduler.kv_cache.weight_version

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]] | StagedWeights, version: WeightVersion,
        draft_tensors: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Replaces the whole set of weights between two steps.

        In-flight requests keep their tokens; their keys and values are recomputed, except while the engine is paused with ``keep``.

        Args:
            tensors: The weights by Hugging Face names, or those that ranks have staged.
            version: Their version.
            draft_tensors: The weights of the draft model. Both models are updated, or neither.

        Raises:
            UserError: A set does not fit its model; the old weights stay.
        """
        self._core.synchronize()
        self.weight_digests = replace_weights(self._components, tensors, version, draft_tensors, self._digest_weights)
        self._published.shared = None

    def update_weights_from(self, source: WeightSource, version: WeightVersion) -> Updated:
        """Updates to the published ``version``, of which every tensor-parallel rank reads its own slices. All ranks verify what they read
        before any applies it. Raises ``DamagedWeights`` and the other errors of ``WeightReader.read``; the old weights stay then.

        With a source that ``shares``, an engine that can (``adoptable_layout``) computes with the published weights where they are, and has no copy.
        With a source that the engine does not verify, its version is ``DUMMY_VERSION`` from the first changed weight until ``confirm_weights``. A version that
        ``stage_weights_from`` has staged is not read again."""
        self._core.synchronize()
        if self._ranks is None:
            updated, self.weight_digests = self._published.update(source, version)
            return updated
        staged = self._ranks.read_weights(source, version)
        self.update_weights(staged, version if source.verifies else DUMMY_VERSION)
        self._published.shared = self._ranks.shared
        return staged.updated

    def stage_weights_from(self, source: WeightSource, version: WeightVersion, on_end: Callable[[], None] = lambda: None) -> Staging:
        """Begins to read, verify and pack the published ``version`` in a thread, while the engine computes with the weights that it has; the next
        ``update_weights_from`` of it only puts it in their place. ``on_end`` is called by the thread at its end. May be called while a step is in flight."""
        return self._published.stage(source, version, on_end)

    @property
    def shares_weights(self) -> bool:
        """Whether the engine computes with published weights where they are, and holds no copy."""
        return self._published.shared is not None

    def confirm_weights(self, version: WeightVersion) -> None:
        """Calls the weights that were taken unverified ``version``, when others have verified all of them."""
        self._core.synchronize()
        self._scheduler.kv_cache.weight_version = version

    def held_digests(self) -> list[dict[str, str]]:
        """Returns, for each tensor-parallel rank, the digests of the weights as it holds them now (see ``weight_digests``), computed from its memory."""
        self._core.synchronize()
        return [weight_digests(self.decoder)] if self._ranks is None else self._ranks.held_digests()

    def add_lora(self, request: LoRARequest) -> str:
        """Loads an adapter from its folder, between two steps; returns the digest of its content.

        It replaces the adapter of the same name. In-flight requests that use that one keep their tokens and continue with the new one; their
        keys and values are recomputed. Raises ``UserError``, and changes nothing, if the adapter cannot be used or no slot is free.
        """
        self._core.synchronize()
        adapter = self._adapters.read(request)
        in_use = self._adapters_in_use()
        if request.lora_name in in_use:
            self._scheduler.preemption.preempt_all(Transition.UPDATE)
        self._adapters.put(request, adapter, in_use)
        return adapter.digest

    def remove_lora(self, name: str) -> None:
        """Unloads the adapter ``name``. Raises ``UserError`` if it is not loaded or an in-flight request uses it."""
        self._core.synchronize()
        if name in self._adapters_in_use():
            raise UserError(f"adapter '{name}' is used by in-flight requests; abort them or wait for their outputs")
        self._adapters.remove(name)

    def list_loras(self) -> dict[str, str]:
        """Returns the digest of each loaded adapter's content by its name."""
        return self._adapters.digests()

    def _adapters_in_use(self) -> set[str]:
        return {state.request.adapter for state in self._outputs.request_states.values()} - {""}

    # -- pauses and the cache ------------------------------------------------------------------------------------------

    def pause(self, mode: str = "recompute") -> None:
        """Pauses the engine with a ``PauseMode``. Steps still return outputs, and new requests wait. Raises ``UserError`` for an unknown mode,
        and for ``keep`` in a deterministic engine."""
        if mode not in list(PauseMode):
            raise UserError(f"pause mode is {mode!r}; it must be one of {', '.join(PauseMode)}")
        if mode == PauseMode.KEEP and self.settings.deterministic:
            raise UserError(
                "pause mode is 'keep', which mixes keys and values of two weight versions; use 'recompute', or start the engine with "
                "deterministic=False"
            )
        self._core.synchronize()
        self._scheduler.pause = PauseMode(mode)
        if mode == PauseMode.ABORT:
            for request_id in self.request_ids:
                self.abort(request_id)

    def resume(self) -> None:
        """Resumes after a pause."""
        self._scheduler.pause = None

    @property
    def is_paused(self) -> bool:
        return self._scheduler.pause is not None

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. In-flight requests keep their blocks."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def record_block_events(self) -> BlockEvents:
        """Returns where changes of the prefix cache are recorded from now on."""
        return self._scheduler.kv_cache.record_block_events()

    def block_exchange(self) -> BlockExchange:
        """Returns what copies blocks of the prefix cache to and from other engines. Raises ``UserError`` for an engine whose blocks no other one can use."""
        layout = kv_layout(self.decoder, self.settings, self._components, self.weight_digests)
        return BlockExchange(layout, self._scheduler.kv_cache, self._runner, self._core.synchronize)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache, and at ``level`` 2 that of the weights too, which have to be updated before ``wake_up`` (the levels of
        vLLM's sleep mode). In-flight requests are recomputed after ``wake_up``. Raises ``UserError`` for an engine with ranks."""
        if self._ranks is not None:
            raise UserError("a tensor-parallel engine cannot sleep; stop it, or use one rank")
        self._core.sleep(frees_weights=level > 1)
        if level > 1:
            self._published.shared = None
        give_back()

    def wake_up(self) -> None:
        """Allocates the memory of the KV cache again after ``sleep``."""
        self._core.wake_up()

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of the KV cache on every rank together; 0 while the engine sleeps."""
        return self._core.kv_cache_bytes * self.decoder.shard_spec.size

    @property
    def is_sleeping(self) -> bool:
        return self._core.is_sleeping

    def close(self) -> None:
        """Stops the other ranks of a tensor-parallel engine and closes shared memory. The engine cannot be used afterwards."""
        if self._ranks is not None:
            self._ranks.close()
        self._published.close()

    # -- statistics ----------------------------------------------------------------------------------------------------

    def counts(self) -> dict[State, int]:
        """Returns the number of sequences in each state; ``completed`` counts all since the start."""
        return counts_of(self._scheduler, self._outputs.unfinished_sequences())

    def transitions(self) -> dict[Transition, int]:
        """Returns how often each transition was made."""
        return {transition: self._scheduler.counts[transition] for transition in Transition}

    def cumulative_stats(self) -> CumulativeStats:
        """Returns statistics since the start."""
        return self._logger.cumulative_stats()

    def stats(self) -> EngineStats:
        """Returns the current statistics."""
        unfinished_sequences, requests = self._outputs.unfinished_sequences(), len(self._outputs.request_states)
        return engine_stats(self._scheduler, len(unfinished_sequences), requests, self._core.num_tokens, self._logger.speculation)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless blocks, rows, tables, swap space and states are consistent."""
        self._core.check_integrity()
        scheduled, unfinished = sequences_of(self._scheduler), self._outputs.unfinished_sequences()
        assert len(scheduled) == len(set(scheduled)) and set(scheduled) == set(unfinished), "a sequence is lost or scheduled twice"
