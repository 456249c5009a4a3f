"""A request, its sequences, and the prefills that they wait for."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.core.lifecycle import State
from tandem.engine.processing.stop_checker import StopChecker
from tandem.engine.sample.logits_processors import LogitsProcessors
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.engine.structured_output.manager import GrammarCursor
from tandem.types import WeightVersion


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    ``key`` and ``params.seed`` (or the engine's ``seed``) determine every random number of the request; completion i draws as index
    ``first_index + i``. ``priority``: lower goes first, as in vLLM; ``arrival`` breaks ties. ``stop_token_ids``: all tokens that end a
    completion; ``end_token_ids``: those of them that the tokenizer declares. ``adapter``: the name of its LoRA adapter, empty for none.
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
    """Tokens, prompt and completion together, at which a completion ends."""
    logits_processors: LogitsProcessors | None = None
    """``None`` where the logits are not changed."""
    draft_tokens: int = 0
    """Draft tokens that are proposed for it in one step at most (``tandem.engine.spec_decode.speculative``)."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the host takes part in each of its steps, so that none can be launched before the last one has ended."""
        has_scores = self.params.logprobs is not None or self.params.prompt_logprobs is not None
        return self.logits_processors is not None or bool(self.adapter) or has_scores


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request.

    ``row``: its row of the input batch, -1 while it has none. ``blocks``: its block table and ``block_hashes`` the hashes of the first full
    ones; both empty while it has no row. ``offset``: while it decodes, the position fed at engine step t is ``offset + t``. ``due``: the step
    before which it needs a block. ``cached``: tokens that the prefix cache held when it was first computed.

    The lists hold the tokens that were read back from the input batch: all of them whenever the sequence has no row.
    """

    request: Request
    index: int
    random_key: int
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    offset: int = 0
    due: int = 0
    cached: int = -1
    token_ids: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[WeightVersion] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    stop_checker: StopChecker | None = None
    """Of a request with stop texts or a stream."""
    streamed_tokens: int = 0
    streamed_characters: int = 0
    """How much of a stream was handed out."""
    cursor: GrammarCursor | None = None
    """The position in the grammar of a request with structured output."""
    state: State = State.WAITING
    preemptions: int = 0
    """How often it was preempted. Each preemption raises the number of free blocks that its next admission requires."""
    is_mixed: bool = False
    """Whether its keys and values are of several weight versions, so that the prefix cache must not share them."""
    draft: DraftLength | None = None
    ngrams: Any = None
    """The index of its tokens (``tandem.engine.spec_decode.ngram_proposer``)."""
    draft_computed: int = 0
    """How many of its tokens are in the cache of the draft model."""

    @property
    def is_done(self) -> bool:
        return self.state is State.COMPLETED

    @property
    def order(self) -> tuple[int, int, int]:
        """Lower goes first."""
        return self.request.priority, self.request.arrival, self.index

    def discard_output(self) -> None:
        """Removes all tokens: of a request that only scores its prompt, for which a step draws one nevertheless."""
        for drawn in (self.token_ids, self.raw_logprobs, self.sampling_logprobs, self.weight_versions, self.top_logprobs):
            drawn.clear()

    @property
    def known_tokens(self) -> list[int]:
        return self.request.prompt_token_ids + self.token_ids


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to be computed before ``sequences`` can draw their next one: the prompt of a whole group, or all known tokens of one
    preempted sequence.

    ``computed`` tokens are in ``blocks`` already, ``cached`` of them from the prefix cache, which is not used where ``is_scored``: the
    log-probabilities of all tokens are wanted. ``rows`` are assigned at admission. ``block_hashes``: of its full blocks, in the chain that
    starts from ``root_hash``.
    """

    sequences: list[Sequence]
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    root_hash: bytes = b""
    rows: list[int] = field(default_factory=list)
    cached: int = 0
    host_blocks: list[int] = field(default_factory=list)
    """The block table in host memory of a swapped-out sequence, which is not prefilled."""
    is_scored: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        return self.sequences[0].order

    @property
    def is_void(self) -> bool:
        """Whether its request was aborted (a prefill is of one request)."""
        return self.sequences[0].is_done

    @property
    def has_begun(self) -> bool:
        """Whether its sequences ran before and were preempted."""
        return self.sequences[0].preemptions > 0


def random_key(seed: int, request_key: int, index: int) -> int:
    """Returns the signed 64-bit key of one completion's random numbers: a digest, so that similar keys draw unrelated numbers."""
    text = f"{seed}\0{request_key}\0{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
