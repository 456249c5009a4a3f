"""Proposes draft tokens from the sequence itself and from all completions of its prompt, finished and running.

SuffixDecoding (Oliaro et al., 2024) looks up the end of a sequence in earlier outputs. The completions of one prompt resemble each other most, as the
samples of a group in reinforcement learning do: "Seer" (Qin et al., 2025) and DAS (Shao et al., 2025) draft a group's long tail from its other answers. Here
each prompt has an index of its own, so a draft never shows what another prompt's answer was.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.spec_decode.step_costs import StepCosts
from tandem.engine.spec_decode.suffix_automaton import ROOT, SuffixAutomaton
from tandem.kernels.api import CacheLayer

_FIRST_RATE = 0.5
"""The acceptance rate before anything was measured."""
_LEARNING_RATE = 0.02
"""The weight of a verified token in the moving average of its match."""
_SIZES = 8
"""Powers of two that are told apart."""
class MatchAcceptance:
    """How often a draft token is accepted, by the number of tokens that match before it, in powers of two; relative to its frequency after the match."""

    def __init__(self) -> None:
        self._rates = [_FIRST_RATE] * _SIZES

    def rate(self, match: int) -> float:
        """Returns the rate after ``match`` matching tokens."""
        return self._rates[min(match.bit_length(), _SIZES) - 1]

    @property
    def best(self) -> float:
        """The highest rate after any match."""
        return max(self._rates)

    def learn(self, match: int, draft: Series[int], tokens: Series[int]) -> None:
        """Records that ``tokens`` were drawn where ``draft`` was proposed: the first that differs was rejected, and nothing is known of those after it."""
        for place, (proposed, token) in enumerate(zip(draft, tokens, strict=False)):
            size = min((match + place).bit_length(), _SIZES) - 1
            self._rates[size] += _LEARNING_RATE * ((proposed == token) - self._rates[size])
            if proposed != token:
                return


class PathChance:
    """The probability that all draft tokens of one proposal up to the next are accepted, which must be at least ``worth``. ``match``: of the first."""

    def __init__(self, acceptance: MatchAcceptance, worth: float) -> None:
        self._acceptance, self._worth, self._chance, self.match = acceptance, worth, 1.0, 0

    def __call__(self, match: int, frequency: float) -> bool:
        self.match = self.match or match
        self._chance *= frequency * self._acceptance.rate(match)
        return self._chance >= self._worth


@dataclass(slots=True, eq=False)
class PromptIndex:
    """The index of a prompt's ``completions``. ``behind``: those that may have tokens that it does not have yet."""

    prompt: list[int]
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    begin: int = ROOT
    completions: int = 0
    behind: list["IndexedCompletion"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class IndexedCompletion:
    """A completion in its prompt's ``index``, which has its first ``count`` tokens, up to ``state``. ``token_ids``: the list of its sequence, which has all
    tokens once the sequence has no row. ``draft``: what was proposed last, after ``match`` matching tokens."""

    index: PromptIndex
    token_ids: list[int]
    count: int = 0
    state: int = ROOT
    match: int = 0
    draft: list[int] = field(default_factory=list)

    def extend(self, tokens: Series[int]) -> None:
        """Appends the tokens after the first ``count``."""
        automaton = self.index.automaton
        if self.state == ROOT:
            if self.index.begin == ROOT:
                self.index.begin = automaton.extend(ROOT, self.index.prompt)
            self.state = self.index.begin
        self.state = automaton.extend(self.state, tokens)
        self.count += len(tokens)


class SuffixProposer:
    """Proposes draft tokens for the sequences in the rows of ``batch``. ``costs``: those of its steps; ``None``: every token is proposed that is likely
    enough.

    Nothing is indexed before a sequence of the prompt may draft, so that a large batch, which does not, pays nothing.
    """

    def __init__(self, batch: InputBatch, config: SpeculativeConfig, costs: StepCosts | None) -> None:
        self.caches: list[CacheLayer] = []
        self.indices: dict[tuple[str, str, tuple[int, ...]], PromptIndex] = {}
        """By adapter, salt of the prefix cache, and prompt; the oldest first."""
        self.completions = 0
        self._batch, self._config, self._costs = batch, config, costs
        self._acceptance = MatchAcceptance()

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Adds the completions that begin to decode to the index of their prompt, and forgets the oldest prompts."""
        for chunk in chunks:
            joined = [self._batch.speculating[row] for row in chunk.rows if row in self._batch.speculating]
            new = [sequence for sequence in joined if sequence.indexed is None]
            if new:
                index = self._index(new[0].request)
                for sequence in new:
                    sequence.indexed = IndexedCompletion(index, sequence.token_ids)
                index.behind += [sequence.indexed for sequence in new]
                index.completions += len(new)
                self.completions += len(new)
                self._forget(index)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        self._catch_up(sequences)
        least, factor = self._config.suffix_decoding_min_token_prob, self._config.suffix_decoding_max_spec_factor
        worth = self._costs.worth(len(self._batch.sequences)) if self._costs is not None else 0.0
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            completion = sequence.indexed
            chance = PathChance(self._acceptance, worth)
            completion.draft = completion.index.automaton.propose(completion.state, count, factor, least, chance)
            completion.match = chance.match
            drafts.append(completion.draft)
        if self._costs is not None:
            self._costs.best_acceptance = self._acceptance.best
        return drafts

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Indexes the new tokens of all completions of the prompts of ``sequences``."""
        wanted = {sequence.indexed.index for sequence in sequences}
        running = [sequence for sequence in self._batch.speculating.values() if sequence.indexed is not None and sequence.indexed.index in wanted]
        for index in wanted:
            behind, index.behind = index.behind, []
            for completion in behind:
                # The others have rows, and their lists are behind too.
                completion.extend(completion.token_ids[completion.count :])
        new = self._batch.tokens_since(running, [sequence.indexed.count for sequence in running])
        for sequence, tokens in zip(running, new, strict=True):
            completion = sequence.indexed
            if completion.draft:
                self._acceptance.learn(completion.match, completion.draft, tokens)
                completion.draft = []
            completion.extend(tokens)
            # Tokens that it draws after this are indexed with the next proposal, also if it ends before.
            sequence.indexed.index.behind.append(sequence.indexed)

    def _index(self, request: Request) -> PromptIndex:
        key = (request.adapter, request.cache_salt, tuple(request.prompt_token_ids))
        if key not in self.indices:
            self.indices[key] = PromptIndex(request.prompt_token_ids)
        return self.indices[key]

    def _forget(self, newest: PromptIndex) -> None:
        """Forgets the oldest prompts beyond the number of cached requests. Sequences that still run keep theirs, and a prompt that is asked more often
        than that begins a new index."""
        most = self._config.suffix_decoding_max_cached_requests
        for key, index in list(self.indices.items()):
            if self.completions <= most:
                return
            if index is not newest or index.completions > most:
                del self.indices[key]
                self.completions -= index.completions
