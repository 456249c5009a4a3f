"""A random walk through everything that scheduler and allocator can be asked, over a cache whose content is checked.

No model runs. A slot of the simulated cache holds a digest of weights, adapter, salt and all tokens up to its own; before a token
is drawn every position that it looks at must hold the right one, and what is drawn must not depend on anything else.
"""

import hashlib
import random
from array import array

from tandem.engine.core import batches, decode, preemption, prefill
from tandem.engine.core.costs import PreemptionCosts
from tandem.engine.core.integrity import check_state, sequences_of
from tandem.engine.core.lifecycle import TRANSITIONS, State, Transition, move
from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.core.scheduler import Chunk, Decision, schedule
from tandem.engine.core.state import Limits, PauseMode, SchedulerState
from tandem.engine.kv_cache.block_pool import BlockAllocator
from tandem.engine.kv_cache.block_table import RELEASED, blocks_for
from tandem.engine.kv_cache.prefix_cache import PrefixCache
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode import draft_plan
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.types import WeightVersion

LONGEST = 96
Slots = dict[int, list[int]]


def token_at(sequence: Sequence, position: int) -> int:
    """What ``sequence`` draws at ``position``: nearly always one of two tokens, so that sequences often agree for a while."""
    text = f"{sequence.random_key}/{position}".encode()
    return int(hashlib.blake2b(text, digest_size=1).digest()[0] > 200)


class Walk:
    """An engine without a model, of random settings."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        blocks = rng.choice((6, 7, 12, 40))
        joins = rng.choice(("chunked", "chunked", "chunked", "continuous", "dynamic", "static"))
        reserved = rng.random() < 0.15
        limits = Limits(
            max_num_seqs=rng.choice((2, 5)),
            max_num_batched_tokens=rng.choice((5, 16, 64)) if joins == "chunked" else LONGEST,
            joins=joins,
            preemption=rng.choice(("auto", "swap", "recompute")),
            watermark=rng.choice((0, 1)),
            reservation=blocks_for(LONGEST) if reserved else 0,
            window=rng.choice((0, 0, 7, 16, 33)),
            guessing_seqs=rng.choice((2, 99)),
        )
        self.allocator = BlockAllocator(blocks)
        self.state = SchedulerState(
            limits, self.allocator, PrefixCache(self.allocator, rng.random() < 0.6 and not reserved), WeightVersion(0, 0), self.read_back,
            host=BlockAllocator(rng.choice((0, 3, 20))), costs=PreemptionCosts(1.0, 0.01, 0.1, rng.choice((1.0, 60.0))),
        )
        self.guesses = rng.choice((0, 0, 3))
        self.device: Slots = {block: [0] * 16 for block in range(blocks)}
        self.host: Slots = {block: [0] * 16 for block in range(self.state.host.count)}
        self.tables: dict[int, list[int]] = {}
        self.drawn: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, int] = {}
        self.requests: dict[str, list[Sequence]] = {}
        self.arrivals = 0
        self.completed = 0

    # -- what a caller does ----------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        n = rng.choice((1, 1, 1, 2, 3))
        n = min(n, self.state.limits.max_num_seqs)
        prompt = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 60))]
        top = min(LONGEST, len(prompt) + rng.randrange(1, 50))
        request = Request(
            str(self.arrivals), None, prompt, SamplingParams(n=n), 0, 0, self.arrivals, priority=rng.choice((0, 0, 0, 1, 2)),
            cache_salt=rng.choice(("", "", "s")), adapter=rng.choice(("", "", "a")), max_length=top, draft_tokens=self.guesses,
        )
        self.arrivals += 1
        sequences = [Sequence(request, i, rng.randrange(1 << 30), draft=DraftLength(3, 0.0) if self.guesses else None) for i in range(n)]
        self.requests[request.id] = sequences
        self.ends.update({s: rng.randrange(len(prompt) + 1, top + 1) for s in sequences})
        size = 1 if self.state.limits.reservation else n
        for first in range(0, n, size):
            prefill.queue(self.state, Prefill(sequences[first : first + size], prompt))

    def abort(self) -> None:
        if not self.requests:
            return
        sequences = self.requests.pop(self.rng.choice(list(self.requests)))
        state = self.state
        running = [s for s in sequences if s.row >= 0]
        self.read_back(running)
        decode.leave(state, running, has_ended=True)
        preemption.drop_swapped(state, lambda waiting: waiting.sequences[0] in sequences)
        if state.prefilling is not None and state.prefilling.sequences[0] in sequences:
            prefill.give_up(state, state.prefilling)
        for sequence in sequences:
            if not sequence.is_done:
                move(sequence, Transition.ABORT, state.counts)
        self.settle()

    def update(self) -> None:
        preemption.preempt_all(self.state, self.rng.choice((Transition.UPDATE, Transition.FAIL)))
        self.state.version = WeightVersion(0, self.state.version.step + 1)
        if self.rng.random() < 0.5:
            self.allocator.forget_all()

    def pause(self) -> None:
        self.state.pause = None if self.state.pause else PauseMode.WAIT

    def settle(self) -> None:
        if self.state.ended and not (self.state.decoding or self.state.prefilling):
            batches.free_ended(self.state)

    # -- what a runner does ----------------------------------------------------------------------------------------------

    def step(self) -> Decision:
        state = self.state
        decision = schedule(state)
        self.check(decision)
        for row in [row for chunk in decision.prefill for row in chunk.rows] + list(decision.resumed):
            self.tables[row] = list(state.decoding[row].blocks)
        for sources, targets, copies in (
            (self.device, self.host, decision.swap_outs), (self.host, self.device, decision.swap_ins),
            (self.device, self.device, decision.copies),
        ):
            staged = [(target, list(sources[source])) for source, target in copies]
            for target, content in staged:
                targets[target] = content
        for row, column, block in decision.changes:
            table = self.tables[row]
            table += [RELEASED] * (column + 1 - len(table))
            table[column] = block
        self.compute(decision)
        return decision

    def compute(self, decision: Decision) -> None:
        """All writes, then all reads, then the draws."""
        state, fed, read = self.state, {}, []
        for row, most in zip(decision.decode, decision.drafts or (0,) * len(decision.decode), strict=True):
            sequence = state.decoding[row]
            known = self.known(sequence)
            right = [token_at(sequence, len(known) + i) for i in range(most)]
            accepted = self.rng.randrange(most + 1)
            guess = right[:accepted] + [9] * (most - accepted)
            fed[row] = (most, accepted)
            self.write(self.tables[row], sequence, known + guess, len(known) - 1)
            read.append((self.tables[row], sequence, known, len(known) - 1))
        for chunk in decision.prefill:
            sequence = self.sequence_of(chunk)
            known = self.known(sequence)[: chunk.start + len(chunk.tokens)]
            assert known[chunk.start :] == list(chunk.tokens)
            self.write(list(chunk.blocks), sequence, known, chunk.start)
            read.append((list(chunk.blocks), sequence, known, chunk.start))
        for table, sequence, known, first in read:
            self.look(table, sequence, known, first)
        for row, (most, accepted) in fed.items():
            self.draw(row, accepted + 1)
            if most:
                draft_plan.advance(state, row, most, accepted)
        for row in [row for chunk in decision.prefill for row in chunk.rows]:
            self.draw(row, 1)
        ended = [s for s in state.decoding.values() if len(self.known(s)) >= self.ends[s]]
        self.read_back(ended)
        decode.leave(state, ended, has_ended=True)
        for sequence in ended:
            move(sequence, Transition.STOP, state.counts)
            self.finish(sequence)
        self.settle()

    def sequence_of(self, chunk: Chunk) -> Sequence:
        if chunk.rows:
            return self.state.decoding[chunk.rows[0]]
        assert self.state.prefilling is not None
        return self.state.prefilling.sequences[0]

    def known(self, sequence: Sequence) -> list[int]:
        return sequence.known_tokens + self.drawn.get(sequence, [])

    def draw(self, row: int, count: int) -> None:
        sequence = self.state.decoding[row]
        for _ in range(count):
            known = self.known(sequence)
            if len(known) < self.ends[sequence]:
                self.drawn.setdefault(sequence, []).append(token_at(sequence, len(known)))

    def read_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.token_ids += self.drawn.pop(sequence, [])

    def finish(self, sequence: Sequence) -> None:
        prompt = len(sequence.request.prompt_token_ids)
        assert sequence.token_ids == [token_at(sequence, i) for i in range(prompt, self.ends[sequence])]
        self.completed += 1
        group = self.requests.get(sequence.request.id, [])
        if all(other.is_done for other in group):
            self.requests.pop(sequence.request.id, None)

    # -- the cache -------------------------------------------------------------------------------------------------------

    def digests(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        digest = hash((self.state.version, sequence.request.adapter, sequence.request.cache_salt))
        found = array("q")
        for token in tokens:
            digest = hash((digest, token))
            found.append(digest)
        return found.tolist()

    def write(self, table: list[int], sequence: Sequence, tokens: list[int], first: int) -> None:
        digests = self.digests(sequence, tokens)
        for position in range(first, len(tokens)):
            block = table[position // 16]
            assert self.allocator.references(block) == 1 or position < len(self.known(sequence)), "a guess is written to a shared block"
            self.device[block][position % 16] = digests[position]

    def look(self, table: list[int], sequence: Sequence, tokens: list[int], first: int) -> None:
        window = self.state.limits.window
        digests = self.digests(sequence, tokens)
        for position in range(max(0, first - window + 1) if window else 0, len(tokens)):
            assert self.device[table[position // 16]][position % 16] == digests[position], "a position holds something else"

    def check(self, decision: Decision) -> None:
        limits = self.state.limits
        total = len(decision.decode) + sum(decision.drafts) + sum(len(chunk.tokens) for chunk in decision.prefill)
        assert total <= limits.max_num_batched_tokens
        assert len(set(decision.decode)) == len(decision.decode)
        targets = [copy.target for copy in decision.copies + decision.swap_ins]
        assert len(set(targets)) == len(targets)
        assert not (decision.preempted and (decision.swap_ins or decision.resumed))


def walk(seed: int, operations: int) -> None:
    rng = random.Random(seed)
    transitions = dict.fromkeys(Transition, 0)
    done = completed = 0
    while done < operations:
        bench = Walk(rng)
        actions = {bench.add: 12, bench.abort: 2, bench.update: rng.choice((0, 0, 1)), bench.pause: rng.choice((0, 1)), bench.step: 85}
        chosen = rng.choices(list(actions), list(actions.values()), k=min(500, operations - done))
        for action in chosen:
            if action != bench.add or len(bench.requests) < 12:
                action()
            check_state(bench.state)
        done += len(chosen)
        bench.state.pause = None
        for _ in range(20_000):
            if not sequences_of(bench.state):
                break
            bench.step()
        assert not sequences_of(bench.state), "somebody never comes to an end"
        check_state(bench.state)
        assert bench.allocator.free_count == bench.allocator.count and bench.state.host.free_count == bench.state.host.count
        completed += bench.completed
        for transition, count in bench.state.counts.items():
            transitions[transition] += count
    # Budget stops are the engine's name for an end; everything else must have happened.
    assert all(count for transition, count in transitions.items() if transition is not Transition.BUDGET_STOP), transitions
    assert completed > operations / 100


def test_a_hundred_thousand_random_operations_break_no_invariant() -> None:
    walk(0, 100_000)


def test_every_state_can_be_left_but_completed() -> None:
    left = {source for sources, _ in TRANSITIONS.values() for source in sources}
    assert left == set(State) - {State.COMPLETED}
    assert {target for _, target in TRANSITIONS.values()} == set(State) - {State.WAITING}
