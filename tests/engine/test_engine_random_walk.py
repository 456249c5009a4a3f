"""A random walk through all operations of scheduler and allocator, over a cache whose content is checked. No model runs. A slot of the
simulated cache holds a digest of weights, adapter, salt and all tokens up to its own. Before a token is drawn, every position that it
attends to must have the right digest, and the token must not depend on anything else. Of some walks a row of states holds the digest of all tokens that it
was computed with."""

import hashlib
import random
import re
from array import array
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tandem.engine.core.integrity import check_scheduler, sequences_of
from tandem.engine.core.lifecycle import TRANSITIONS, State, Transition, move
from tandem.engine.core.preemption import PreemptionCosts, PreemptionPolicy
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import PauseMode, Scheduler, SchedulerConfig
from tandem.engine.core.scheduler_output import ScheduledPrefill, SchedulerOutput
from tandem.engine.kv_cache.block_pool import NULL_BLOCK, blocks_for
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.kv_cache.state_rows import StateRows
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.types import WeightVersion

LONGEST = 96
Slots = dict[int, list[int]]


def token_at(sequence: Sequence, position: int) -> int:
    """Returns the token of ``sequence`` at ``position``: nearly always one of two, so that sequences often share a prefix."""
    text = f"{sequence.random_key}/{position}".encode()
    return int(hashlib.blake2b(text, digest_size=1).digest()[0] > 200)


class Watched(Sequence):
    """A sequence that records every change of its state."""

    changes: ClassVar[set[tuple[State, State]]] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and hasattr(self, "state"):
            self.changes.add((self.state, value))
        super().__setattr__(name, value)


class Walk:
    """An engine without a model, with random settings."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        has_states = rng.random() < 0.4
        blocks = rng.choice((7, 12, 40) if has_states else (6, 7, 12, 40))
        batching = rng.choice(("chunked", "chunked", "chunked", "continuous", "dynamic", "static"))
        reserved = rng.random() < 0.15
        config = SchedulerConfig(
            max_num_seqs=rng.choice((2, 5)),
            max_num_batched_tokens=rng.choice((5, 16, 64)) if batching == "chunked" else LONGEST,
            batching=batching,
            watermark_blocks=rng.choice((0, 1)),
            speculative_batch_limit=rng.choice((2, 99)),
        )
        costs = PreemptionCosts(1.0, 0.01, 0.1, rng.choice((1.0, 60.0)))
        self.window = 0 if has_states else rng.choice((0, 0, 7, 16, 33))
        caching, first = rng.random() < (0.9 if has_states else 0.6) and not reserved, config.max_num_seqs
        self.states = StateRows(range(first, first + rng.choice((1, 3, 9)) * caching), rng.choice((1, 4))) if has_states else None
        self.kv_cache = KVCacheManager(
            blocks, enable_prefix_caching=caching, window=self.window, reservation=blocks_for(LONGEST) if reserved else 0,
            num_host_blocks=rng.choice((0, 3, 20)), states=self.states,
        )
        self.rows: dict[int, int] = {}
        self.host_rows: dict[int, int] = {}
        self.served = 0
        policy = PreemptionPolicy(rng.choice(("auto", "swap", "recompute")), lambda: costs)
        self.scheduler = Scheduler(config, self.kv_cache, self.read_back, policy)
        self.guesses = rng.choice((0, 0, 3))
        self.device: Slots = {block: [0] * 16 for block in range(blocks)}
        self.host: Slots = {block: [0] * 16 for block in range(self.kv_cache.host_pool.num_blocks)}
        self.tables: dict[int, list[int]] = {}
        self.drawn: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, int] = {}
        self.requests: dict[str, list[Sequence]] = {}
        self.last: Sequence | None = None
        self.arrivals = 0
        self.completed = 0

    # -- what a caller does ----------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        n = rng.choice((1, 1, 1, 2, 3))
        n = min(n, self.scheduler.config.max_num_seqs)
        prompt = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 60))]
        salt, adapter = rng.choice(("", "", "s")), rng.choice(("", "", "a"))
        if self.last is not None and rng.random() < 0.4:
            # A dialogue goes on, or begins in the same way.
            prompt = (self.last.known_tokens + prompt)[: rng.randrange(1, 80)]
            salt, adapter = self.last.request.cache_salt, self.last.request.adapter
        top = min(LONGEST, len(prompt) + rng.randrange(1, 50))
        request = Request(
            str(self.arrivals), None, prompt, SamplingParams(n=n), 0, 0, self.arrivals, priority=rng.choice((0, 0, 0, 1, 2)),
            cache_salt=salt, adapter=adapter, max_length=top, draft_tokens=self.guesses,
        )
        self.arrivals += 1
        sequences: list[Sequence] = [Watched(request, i, rng.randrange(1 << 30), draft=DraftLength(3, 0.0) if self.guesses else None) for i in range(n)]
        self.requests[request.id] = sequences
        self.ends.update({s: rng.randrange(len(prompt) + 1, top + 1) for s in sequences})
        self.scheduler.add_group(sequences)

    def abort(self) -> None:
        if not self.requests:
            return
        sequences = self.requests.pop(self.rng.choice(list(self.requests)))
        self.scheduler.abort([sequence for sequence in sequences if not sequence.is_done])
        for sequence in sequences:
            if not sequence.is_done:
                move(sequence, Transition.ABORT, self.scheduler.counts)

    def update(self) -> None:
        self.scheduler.preemption.preempt_all(self.rng.choice((Transition.UPDATE, Transition.FAIL)))
        self.kv_cache.weight_version = WeightVersion(0, self.kv_cache.weight_version.step + 1)
        if self.rng.random() < 0.5:
            self.kv_cache.reset_prefix_cache()

    def pause(self) -> None:
        self.scheduler.pause = None if self.scheduler.pause else PauseMode.WAIT

    # -- what a runner does ----------------------------------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.check(output)
        for row in [row for chunk in output.prefills for row in chunk.rows] + list(output.resumed_rows):
            self.tables[row] = list(self.scheduler.running.by_row[row].blocks)
        for sources, targets, copies in (
            (self.device, self.host, output.swap_outs), (self.host, self.device, output.swap_ins),
            (self.device, self.device, output.block_copies),
        ):
            staged = [(target, list(sources[source])) for source, target in copies]
            for target, content in staged:
                targets[target] = content
        self.copy_states(output)
        for row, column, block in output.block_changes:
            table = self.tables[row]
            table += [NULL_BLOCK] * (column + 1 - len(table))
            table[column] = block
        self.compute(output)
        return output

    def compute(self, output: SchedulerOutput) -> None:
        """Performs all writes, then all reads, then draws."""
        scheduler, fed, read, written = self.scheduler, {}, [], dict[int, int]()
        for row, most in zip(output.decode_rows, output.num_draft_tokens or (0,) * len(output.decode_rows), strict=True):
            sequence = scheduler.running.by_row[row]
            known = self.known(sequence)
            right = [token_at(sequence, len(known) + i) for i in range(most)]
            accepted = self.rng.randrange(most + 1)
            guess = right[:accepted] + [9] * (most - accepted)
            fed[row] = (most, accepted)
            self.write(self.tables[row], sequence, known + guess, len(known) - 1)
            self.advance(row, sequence, known + right[:accepted], len(known) - 1)
            read.append((self.tables[row], sequence, known, len(known) - 1))
        for chunk in output.prefills:
            sequence = self.sequence_of(chunk)
            known = self.known(sequence)[: chunk.start + len(chunk.tokens)]
            assert known[chunk.start :] == list(chunk.tokens)
            self.write(list(chunk.blocks), sequence, known, chunk.start)
            self.advance(chunk.state_row, sequence, known, chunk.start)
            kept = {row: self.digests(sequence, known)[chunk.start + place] for place, row in chunk.kept_states}
            assert len(kept) == len(chunk.kept_states) and not kept.keys() & written.keys(), "a row of states is written twice"
            written |= kept
            written |= dict.fromkeys(chunk.rows[1:], self.rows[chunk.state_row])
            read.append((list(chunk.blocks), sequence, known, chunk.start))
        self.rows |= written
        for table, sequence, known, first in read:
            self.look(table, sequence, known, first)
        for row, (most, accepted) in fed.items():
            self.draw(row, accepted + 1)
            if most:
                scheduler.accept_drafts(row, most, accepted)
        for row in [row for chunk in output.prefills for row in chunk.rows]:
            self.draw(row, 1)
        ended = [s for s in scheduler.running.by_row.values() if len(self.known(s)) >= self.ends[s]]
        scheduler.finish(ended)
        for sequence in ended:
            move(sequence, Transition.STOP, scheduler.counts)
            self.finish(sequence)

    def sequence_of(self, chunk: ScheduledPrefill) -> Sequence:
        if chunk.rows:
            return self.scheduler.running.by_row[chunk.rows[0]]
        assert self.scheduler.running.prefilling is not None
        return self.scheduler.running.prefilling.sequences[0]

    def known(self, sequence: Sequence) -> list[int]:
        return sequence.known_tokens + self.drawn.get(sequence, [])

    def draw(self, row: int, count: int) -> None:
        sequence = self.scheduler.running.by_row[row]
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
        self.last = sequence
        group = self.requests.get(sequence.request.id, [])
        if all(other.is_done for other in group):
            self.requests.pop(sequence.request.id, None)

    # -- the cache -------------------------------------------------------------------------------------------------------

    def digests(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        digest = hash((self.kv_cache.weight_version, sequence.request.adapter, sequence.request.cache_salt))
        found = array("q")
        for token in tokens:
            digest = hash((digest, token))
            found.append(digest)
        return found.tolist()

    def write(self, table: list[int], sequence: Sequence, tokens: list[int], first: int) -> None:
        digests = self.digests(sequence, tokens)
        for position in range(first, len(tokens)):
            block = table[position // 16]
            assert self.kv_cache.block_pool.ref_count(block) == 1 or position < len(self.known(sequence)), "a guess is written to a shared block"
            self.device[block][position % 16] = digests[position]

    def look(self, table: list[int], sequence: Sequence, tokens: list[int], first: int) -> None:
        window = self.window
        digests = self.digests(sequence, tokens)
        for position in range(max(0, first - window + 1) if window else 0, len(tokens)):
            assert self.device[table[position // 16]][position % 16] == digests[position], "a position holds something else"

    def copy_states(self, output: SchedulerOutput) -> None:
        swap_outs, swap_ins, saves, loads = output.state_copies
        for sources, targets, copies in ((self.rows, self.host_rows, swap_outs), (self.host_rows, self.rows, swap_ins), (self.rows, self.rows, saves),
                                         (self.rows, self.rows, loads)):  # fmt: skip
            assert len({target for _, target in copies}) == len(copies), "a row of states is written twice"
            targets |= {target: sources[source] for source, target in copies}
        self.served += len(loads)

    def advance(self, row: int, sequence: Sequence, tokens: list[int], first: int) -> None:
        """Computes the state in ``row`` after ``tokens`` from that after the ``first`` of them."""
        digests = self.digests(sequence, tokens)
        assert not first or self.states is None or self.rows[row] == digests[first - 1], "a state is that of other tokens"
        self.rows[row] = digests[-1]

    def check(self, output: SchedulerOutput) -> None:
        limits = self.scheduler.config
        total = len(output.decode_rows) + sum(output.num_draft_tokens) + sum(len(chunk.tokens) for chunk in output.prefills)
        assert total <= limits.max_num_batched_tokens
        assert len(set(output.decode_rows)) == len(output.decode_rows)
        targets = [copy.target for copy in output.block_copies + output.swap_ins]
        assert len(set(targets)) == len(targets)
        assert not (output.preempted and (output.swap_ins or output.resumed_rows))


def walk(seed: int, operations: int) -> None:
    rng = random.Random(seed)
    transitions = dict.fromkeys(Transition, 0)
    done = completed = served = 0
    while done < operations:
        bench = Walk(rng)
        actions = {bench.add: 12, bench.abort: 2, bench.update: rng.choice((0, 0, 1)), bench.pause: rng.choice((0, 1)), bench.step: 85}
        chosen = rng.choices(list(actions), list(actions.values()), k=min(500, operations - done))
        for action in chosen:
            if action != bench.add or len(bench.requests) < 12:
                action()
            check_scheduler(bench.scheduler)
        done += len(chosen)
        bench.scheduler.pause = None
        for _ in range(20_000):
            if not sequences_of(bench.scheduler):
                break
            bench.step()
        assert not sequences_of(bench.scheduler), "a sequence never finishes"
        check_scheduler(bench.scheduler)
        assert bench.kv_cache.num_free_blocks == bench.kv_cache.block_pool.num_blocks
        assert bench.kv_cache.host_pool.num_free_blocks == bench.kv_cache.host_pool.num_blocks
        completed += bench.completed
        served += bench.served
        for transition, count in bench.scheduler.counts.items():
            transitions[transition] += count
    # The walk makes no budget stops, which are the engine's; every other transition must have occurred.
    assert all(count for transition, count in transitions.items() if transition is not Transition.BUDGET_STOP), transitions
    assert completed > operations / 100 and served > operations / 400


def drawn_edges() -> set[tuple[str, State, State]]:
    """Returns the life cycle in ``docs/inference.md`` as (transition, from, to)."""
    text = (Path(__file__).resolve().parents[2] / "docs/inference.md").read_text()
    lines = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (\w+) \|$", text, re.MULTILINE)
    return {(name, State(source.strip()), State(target)) for name, sources, target in lines for source in sources.split(",")}


@pytest.mark.parametrize("operations", [40_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_random_operations_break_no_invariant_and_follow_the_drawn_life_cycle(operations: int) -> None:
    Watched.changes.clear()
    walk(0, operations)
    assert Watched.changes == {(source, target) for _, source, target in drawn_edges()}


def test_the_table_of_transitions_is_the_drawn_life_cycle() -> None:
    assert drawn_edges() == {(str(name), source, target) for name, (sources, target) in TRANSITIONS.items() for source in sources}
