"""The inference engine: requests in, answers out, one step at a time."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core import sleeping
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.core.integrity import sequences_of
from tandem.engine.core.lifecycle import State, Transition
from tandem.engine.core.parts import make_parts
from tandem.engine.core.scheduler import PauseMode
from tandem.engine.core.weight_updates import replace_weights
from tandem.engine.executor.rank_weights import RankWeights, StagedWeights
from tandem.engine.executor.ranks import Ranks
from tandem.engine.kv_cache.kv_cache_manager import FIRST_VERSION
from tandem.engine.lora.request import LoRARequest
from tandem.engine.metrics.stats import CumulativeStats, EngineStats
from tandem.engine.metrics.stats_logger import StatsLogger, counts_of, engine_stats
from tandem.engine.processing.input_processor import InputProcessor
from tandem.engine.processing.output_processor import OutputProcessor
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.weight_digests import weight_digests
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, Updated, UserError, WeightSource, WeightVersion


class Engine:
    """Continuous batching over one decoder. Not thread-safe: one owner adds, steps, aborts and updates.

    ``decoder`` is packed here where it is not, and belongs to the engine from now on. Without a ``tokenizer`` answers
    have no text, and nothing but lengths and ``stop_token_ids`` ends a completion. ``ranks``: the others of a tensor-parallel engine, whose
    first part ``decoder`` is. With ``digest_weights`` each set of weights is digested before it is packed (not with ranks).
    ``speculative``: how draft tokens are proposed, by ``draft`` where its method is ``draft``.
    """

    def __init__(
        self, decoder: Decoder, settings: EngineSettings, tokenizer: Tokenizer | None = None,
        version: WeightVersion = FIRST_VERSION, ranks: Ranks | None = None, digest_weights: bool = False,
        speculative: SpeculativeConfig | None = None, draft: Decoder | None = None,
    ) -> None:
        settings.check(decoder.shapes.max_position_embeddings)
        self.settings = settings
        self.tokenizer = tokenizer
        self.decoder = decoder
        self._digest_weights = digest_weights and ranks is None
        self.weight_digests = weight_digests(decoder) if self._digest_weights else {}
        if not decoder.is_packed:
            decoder.pack()
        self._ranks = ranks
        self._weights: RankWeights | None = None
        self._parts = make_parts(decoder, settings, version, ranks, speculative, draft)
        self._scheduler, self._runner = self._parts.scheduler, self._parts.runner
        self._adapters = self._runner.adapters
        self._logger = StatsLogger()
        self._inputs = InputProcessor(settings, tokenizer, decoder.shapes.vocab_size, speculative)
        self._outputs = OutputProcessor(self._scheduler, self._runner, tokenizer, self._logger)
        self._core = EngineCore(self._parts, self._outputs, self._logger)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt: str | None = None,
        key: int | None = None, first_index: int = 0, priority: int = 0, cache_salt: str = "",
        lora_request: LoRARequest | None = None, num_draft_tokens: int | None = None,
    ) -> None:
        """Queue a request. ``key`` names its random numbers (``None``: the number of requests added before it).
        ``lora_request``: its adapter, loaded here where it is not, or where its folder has changed. ``num_draft_tokens``:
        draft tokens in one step at most (0: none; ``None``: what the engine was told).

        Raises ``UserError``, and queues nothing, where the request cannot be served.
        """
        request = self._inputs.request(
            request_id, prompt_token_ids, params, prompt=prompt, key=key, first_index=first_index, priority=priority, cache_salt=cache_salt,
            adapter=lora_request.lora_name if lora_request is not None else "", num_draft_tokens=num_draft_tokens,
        )
        if request_id in self._outputs.answers:
            raise UserError(f"request id {request_id!r} is in use; give every request an id of its own")
        if lora_request is not None and not self._adapters.is_current(lora_request):
            self.add_lora(lora_request)
        sequences = self._inputs.start(request)
        self._outputs.expect(request, sequences)
        self._scheduler.add_group(sequences, is_scored=params.prompt_logprobs is not None)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ``UserError`` for a request that this engine cannot serve."""
        self._inputs.check(prompt_token_ids, params)

    def abort(self, request_id: str) -> bool:
        """End a request now; its answer, with what was drawn so far, comes with the next step. False where no such
        request is under way."""
        self._core.synchronize()
        answer = self._outputs.answers.get(request_id)
        if answer is not None:
            self._core.abort(answer)
        return answer is not None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to do or to hand out."""
        return bool(self._outputs.answers) or self.has_outputs

    @property
    def request_ids(self) -> list[str]:
        """The requests that are not answered yet."""
        return list(self._outputs.answers)

    @property
    def has_outputs(self) -> bool:
        """Whether ``take_outputs`` has something to hand out."""
        return self._outputs.has_news

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that are answered, and what is new of those that are streamed."""
        if not self.decoder.is_packed:
            raise RunError("the engine has no whole set of weights since an update failed; update the weights again")
        if self.is_sleeping:
            raise RunError("the engine is asleep; wake it up before its next step")
        if self._scheduler.pause in (None, PauseMode.WAIT):
            self._core.step()
        return self._outputs.take()

    def take_outputs(self) -> list[RequestOutput]:
        """What the next ``step`` would hand out without computing anything: the answers of aborted requests."""
        return self._outputs.take()

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
        """Take a whole set of weights, by Hugging Face names, between two steps; with ``draft_tensors`` the draft model's too, both or
        neither.

        Requests under way keep their tokens; their keys and values are computed again under the new weights, except while the
        engine is paused with ``keep``. Where a set does not fit its model ``UserError`` is raised and the old weights stay.
        """
        self._core.synchronize()
        self.weight_digests = replace_weights(self._parts, tensors, version, draft_tensors, self._digest_weights)

    def update_weights_from(self, source: WeightSource, version: WeightVersion) -> Updated:
        """``update_weights`` with the published ``version``, of which every tensor-parallel rank reads its own slices. All ranks verify
        what they read before any applies it. Raises ``DamagedWeights`` and what else ``WeightReader.read`` raises; the old weights stay
        then."""
        self._core.synchronize()
        if self._ranks is not None:
            staged = self._ranks.read_weights(source, version)
            self.update_weights(staged, version)
            return staged.updated
        if self._weights is None or self._weights.source != source:
            self._weights = RankWeights(self.decoder, source)
        weights = self._weights.read(version)
        self.update_weights(weights.tensors, version)
        return Updated(version, weights.size_bytes, weights.rereads)

    def add_lora(self, request: LoRARequest) -> str:
        """Read an adapter from its folder, between two steps; returns the digest of its content.

        It takes the place of the one with its name. Requests under way with that one keep their tokens and go on with
        the new one; their keys and values are computed again. Raises ``UserError`` where the adapter cannot be used or
        has no place, and changes nothing then.
        """
        self._core.synchronize()
        adapter = self._adapters.read(request)
        in_use = self._adapters_in_use()
        if request.lora_name in in_use:
            self._scheduler.preemption.preempt_all(Transition.UPDATE)
        self._adapters.put(request, adapter, in_use)
        return adapter.digest

    def remove_lora(self, name: str) -> None:
        """Forget the adapter ``name``. Raises ``UserError`` where it is not loaded or a request under way has it."""
        self._core.synchronize()
        if name in self._adapters_in_use():
            raise UserError(f"adapter '{name}' is used by requests under way; abort them or wait for their answers")
        self._adapters.remove(name)

    def list_loras(self) -> dict[str, str]:
        """The digest of each loaded adapter's content by its name."""
        return self._adapters.digests()

    def _adapters_in_use(self) -> set[str]:
        return {answer.request.adapter for answer in self._outputs.answers.values()} - {""}

    # -- pauses and the cache ------------------------------------------------------------------------------------------

    def pause(self, mode: str = "recompute") -> None:
        """Stop, as ``PauseMode`` has it; steps hand out answers all the same, and requests that are added wait. Raises ``UserError``
        for an unknown mode, and for ``keep`` in a deterministic engine."""
        if mode not in list(PauseMode):
            raise UserError(f"pause mode is {mode!r}; it must be one of {', '.join(PauseMode)}")
        if mode == PauseMode.KEEP and self.settings.deterministic:
            raise UserError(
                "pause mode is 'keep', after which one sequence's keys and values are of two weight versions; use 'recompute', or start "
                "the engine with deterministic=False"
            )
        self._core.synchronize()
        self._scheduler.pause = PauseMode(mode)
        if mode == PauseMode.ABORT:
            for request_id in self.request_ids:
                self.abort(request_id)

    def resume(self) -> None:
        """Go on after a pause."""
        self._scheduler.pause = None

    @property
    def is_paused(self) -> bool:
        return self._scheduler.pause is not None

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold. Requests under way keep theirs."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the memory of the KV cache back. Requests under way wait, and are computed again after ``wake_up``. Raises
        ``UserError`` for an engine with ranks."""
        if self._ranks is not None:
            raise UserError("a tensor-parallel engine cannot sleep; stop it, or use one rank")
        self._core.synchronize()
        sleeping.fall_asleep(self._parts)

    def wake_up(self) -> None:
        if self.is_sleeping:
            sleeping.wake_up(self._parts, self.settings)

    @property
    def is_sleeping(self) -> bool:
        return not self._runner.caches

    def close(self) -> None:
        """End the other ranks of a tensor-parallel engine, and let go of shared memory. It computes nothing any more then."""
        if self._ranks is not None:
            self._ranks.close()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # -- what it does --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[State, int]:
        """How many sequences are in each state; all that were ever ``completed`` count."""
        return counts_of(self._scheduler, self._outputs.open_sequences())

    def transitions(self) -> dict[Transition, int]:
        """How often each transition was made."""
        return {transition: self._scheduler.counts[transition] for transition in Transition}

    def cumulative_stats(self) -> CumulativeStats:
        """What was computed since the start, and how well the cache was used."""
        return self._logger.cumulative_stats()

    def stats(self) -> EngineStats:
        """What it does now."""
        open_sequences, requests = self._outputs.open_sequences(), len(self._outputs.answers)
        return engine_stats(self._scheduler, len(open_sequences), requests, self._core.num_tokens, self._logger.speculation)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless blocks, rows, tables, swap space and states are consistent. Idle, all blocks are free or cached."""
        self._core.check_integrity()
        found = sequences_of(self._scheduler)
        assert len(found) == len(set(found)) and set(found) == set(self._outputs.open_sequences()), "a sequence is in no place, or in two"
