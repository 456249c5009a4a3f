"""A request, its sequences, their prefills, and the queue of waiting prefills."""

import hashlib
import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.engine.core.lifecycle import State, Transition, move
from tandem.engine.pooling.params import PoolingParams
from tandem.engine.processing.outputs import PreemptionTime
from tandem.engine.processing.repetition import RepetitionDetector
from tandem.engine.processing.stop_checker import StopChecker
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.types import WeightVersion

if TYPE_CHECKING:
    # They import torch, which the scheduler does without.
    from tandem.engine.sample.logits_processors import LogitsProcessors
    from tandem.engine.structured_output.manager import GrammarCursor


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    ``key`` and ``params.seed`` (or the engine's ``seed``) determine every random number of the request; completion i draws as index
    ``first_index + i``. ``priority``: lower values are scheduled first, as in vLLM; ``arrival`` breaks ties. ``stop_token_ids``: all tokens
    that end a completion; ``end_token_ids``: those of them that the tokenizer declares. ``adapter``: the name of its LoRA adapter, empty for
    none.
    """

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    key: int
    arrival: int
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    first_index: int = 0
    cache_salt: str = ""
    adapter: str = ""
    max_length: int = 0
    """Maximum number of tokens of a sequence, prompt and completion together."""
    logits_processors: "LogitsProcessors | None" = None
    """``None`` where the logits are not changed."""
    draft_tokens: int = 0
    """Maximum number of draft tokens that a step proposes for each of its sequences (``tandem.engine.spec_decode.speculative``)."""

    pooling: PoolingParams | None = None
    """What a request asks for that draws no tokens, and of which the hidden states of its prompt are wanted."""
    reads_all_states: bool = False
    """Whether it needs the hidden states of all its tokens, so that the prefix cache is not used."""
    preemptions: list[PreemptionTime] = field(default_factory=list)
    """Of its sequences, in order."""

    def preempted(self, index: int, how: Transition) -> None:
        """Records that sequence ``index`` has lost its blocks."""
        self.preemptions.append(PreemptionTime(index, str(how), time.monotonic()))

    def resumed(self, index: int) -> None:
        """Records that sequence ``index`` has blocks again."""
        newest = next((each for each in reversed(self.preemptions) if each.index == index), None)
        if newest is not None:
            newest.again_s = newest.again_s or time.monotonic()

    @property
    def is_synchronous(self) -> bool:
        """Whether the host takes part in each of its steps, so that no step can be launched before the previous one has ended."""
        has_scores = self.params.logprobs is not None or self.params.prompt_logprobs is not None
        return self.logits_processors is not None or bool(self.adapter) or has_scores or self.pooling is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request.

    ``row``: its row of the input batch, -1 while it has none. ``blocks``: its block table; ``block_hashes``: the hashes of the first full
    blocks; both are empty while it has no row. ``offset``: while it decodes, the position fed at engine step t is ``offset + t``. ``due``: the
    step before which it needs a block. ``num_cached_tokens``: prompt tokens that the prefix cache held when it was first admitted, -1 before.

    The token lists hold what was read back from the input batch: all tokens whenever the sequence has no row.
    """

    request: Request
    index: int
    random_key: int
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    offset: int = 0
    due: int = 0
    num_cached_tokens: int = -1
    token_ids: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[WeightVersion] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    stop_checker: StopChecker | None = None
    """Set for a request with stop texts or a stream."""
    repetition: RepetitionDetector | None = None
    streamed_tokens: int = 0
    streamed_characters: int = 0
    """How much of a stream was returned to the caller."""
    cursor: "GrammarCursor | None" = None
    """The position in the grammar of a request with structured output."""
    state: State = State.WAITING
    num_preemptions: int = 0
    """Each preemption raises the number of free blocks that its next admission requires."""
    is_mixed: bool = False
    """Whether its keys and values were computed with several weight versions, so that the prefix cache must not share them."""
    draft: DraftLength | None = None
    ngrams: Any = None
    """The index of its tokens (``tandem.engine.spec_decode.ngram_proposer``)."""
    indexed: Any = None
    """Its place in the index of its prompt (``tandem.engine.spec_decode.suffix_proposer``)."""
    draft_computed: int = 0
    """How many of its tokens are in the cache of the draft model."""
    unread_states: Any = None
    """The model's hidden states that a draft head has not read (``tandem.engine.spec_decode.unread_states``)."""
    snapshot_row: int = -1
    """The row of a copy of its states of linear attention (``tandem.engine.kv_cache.state_rows``), -1 without one."""
    snapshot_tokens: int = 0
    """The number of tokens after which they were copied."""

    @property
    def is_done(self) -> bool:
        return self.state is State.COMPLETED

    @property
    def order(self) -> tuple[int, int, int]:
        """The scheduling order: lower is scheduled first and preempted last."""
        return self.request.priority, self.request.arrival, self.index

    def discard_output(self) -> None:
        """Removes all drawn tokens: for a request that only scores its prompt, for which a step draws one nevertheless."""
        for values in (self.token_ids, self.raw_logprobs, self.sampling_logprobs, self.weight_versions, self.top_logprobs):
            values.clear()

    @property
    def known_tokens(self) -> list[int]:
        return self.request.prompt_token_ids + self.token_ids

    @property
    def num_known_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to compute before ``sequences`` can draw their next one: the prompt of a whole group, or all known tokens of one preempted
    sequence.

    ``num_computed_tokens``: tokens whose keys and values are in ``blocks``, of which ``num_cached_tokens`` came from the prefix cache. The
    prefix cache is not used with ``is_scored``, which asks for the log-probabilities of all tokens. ``rows`` are assigned at admission.
    ``block_hashes``: the hashes of its full blocks, in the chain that starts from ``root_hash``.
    """

    sequences: list[Sequence]
    tokens: list[int]
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    root_hash: bytes = b""
    rows: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    host_blocks: list[int] = field(default_factory=list)
    """The block table in host memory of a swapped-out sequence, which is swapped in instead of prefilled."""
    is_scored: bool = False
    num_matched_blocks: int = 0
    """The first of its blocks that the prefix cache had when it was last admitted, with or without a snapshot of states at their end."""
    host_row: int = -1
    """The row in host memory of the states of a swapped-out sequence of a model with linear attention."""

    @property
    def order(self) -> tuple[int, int, int]:
        return self.sequences[0].order

    @property
    def is_void(self) -> bool:
        """Whether its request was aborted. All sequences of a prefill belong to one request."""
        return self.sequences[0].is_done

    @property
    def has_begun(self) -> bool:
        """Whether its sequences were admitted before and then preempted."""
        return self.sequences[0].num_preemptions > 0


class RequestQueue:
    """A heap of waiting prefills by ``Prefill.order``. Prefills that were preempted in a step enter it with the next step."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Prefill]] = []
        self._preempted: list[Prefill] = []

    def __iter__(self) -> Iterator[Prefill]:
        """Yields all prefills, including those of aborted requests that have not been dropped yet."""
        yield from (prefill for _, prefill in self._heap)
        yield from self._preempted

    def push(self, prefill: Prefill) -> None:
        heapq.heappush(self._heap, (prefill.order, prefill))

    def push_preempted(self, prefill: Prefill) -> None:
        """Adds a prefill whose sequences were preempted in this step."""
        self._preempted.append(prefill)

    def requeue(self, counts: Counter[Transition]) -> None:
        """Moves the sequences that were preempted in the last step to ``waiting``."""
        for prefill in self._preempted:
            if not prefill.is_void:
                for sequence in prefill.sequences:
                    move(sequence, Transition.REQUEUE, counts)
                self.push(prefill)
        self._preempted.clear()

    def peek(self) -> Prefill | None:
        """Returns the first prefill without removing it, or ``None``. Drops prefills of aborted requests ahead of it."""
        while self._heap and self._heap[0][1].is_void:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Prefill:
        """Removes and returns the first prefill."""
        return heapq.heappop(self._heap)[1]


def random_key(seed: int, request_key: int, index: int) -> int:
    """Returns the signed 64-bit key of one completion's random numbers: a digest, so that similar inputs give unrelated numbers."""
    text = f"{seed}\0{request_key}\0{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
