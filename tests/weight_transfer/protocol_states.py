"""The states of the weights' protocol, abstracted, and what each party can do next. Walked exhaustively by ``protocol_walk.py``.

One trainer publishes a few versions of a model of two tensors; it may die at every step and be started again, in its shim or, while it still runs
unseen (a paused machine, a cut network), in another. Two engines take what is published: engine 0 by copying shared memory (``WeightReader.read``), or
unverified, as one of several whose weights are verified once when all have taken them (``WeightReader.view``, ``PublishedVerifier``), or by computing with
them where they are (``SharedReader``), engine 1 from another
pod (``transport.fetch``), with ``deltas`` from what its pod holds and the elements that have changed (``DeltaWriter``, ``LocalParts``), with ``early`` also
while it is written (``announcement``, ``EarlyReading``). Both may die at every step. A bit of shared memory may flip.

What decides is the code itself: ``publish``, ``replaceable``, ``current`` and ``check_newer`` over a store in memory, manifests and their digests, labels of
segments, ``WeightBuffers.other``, and ``Transitions``. What is modelled beside it is named for the code that it stands for. A tensor is written, read or
damaged in one step; a store's operation is one step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from protocol_code import (
    TENSORS,
    Bytes,
    LooksAgain,
    MemoryStore,
    delta_leads_to,
    digest,
    free_buffer,
    is_in_early,
    label_says,
    manifest_of,
    note_says,
    place_of,
    read_manifest,
    rollout_goes,
    segment_name,
    trainer_goes,
    value_of,
)

from tandem.pod.states import RolloutState, TrainerState
from tandem.runtime.coordination.store import Entry
from tandem.types import RunError, WeightVersion
from tandem.weight_transfer.publication import KEY, check_newer, publish, replaceable

DAMAGED, NOTHING = WeightVersion(-1, -1), WeightVersion(0, 0)


class Protection(NamedTuple):
    """What is switched off in a negative control. ``after``: weights that several engines take are verified after all have taken them, else before;
    ``revision``: only if they were published all the time in between; ``repair``: weights that arrive damaged are registered again; ``delta``: what comes of a
    delta is compared with its digest; ``held``: an engine that shares looks at the label of the memory that it computed with; ``early``: what came before the
    publication is compared with the digests of what is published."""

    compare_and_swap: bool = True
    label: bool = True
    digest: bool = True
    after: bool = True
    revision: bool = True
    repair: bool = True
    delta: bool = True
    held: bool = True
    early: bool = True


ALL = Protection()


class Limits(NamedTuple):
    """How far a walk goes: optimizer steps, deaths, flipped bits, and trainers that are replaced while they still run. ``once``: whether engine 0 is one of
    several whose weights are verified once; ``shares``: whether it computes with the shared memory itself. ``deltas``: whether element-wise deltas are made for
    engine 1, and bits flip in the memory of its pod too. ``early``: whether versions are announced, and engine 1 reads what is written of them; bits flip in
    that too."""

    steps: int = 3
    deaths: int = 1
    flips: int = 1
    replacements: int = 1
    once: int = 0
    deltas: int = 0
    shares: int = 0
    early: int = 0


class Memory(NamedTuple):
    """One segment. ``label``: the version that it says to hold. ``note``: the version and the registration that it announces; ``ready``: which tensors are
    marked."""

    label: WeightVersion | None = None
    tensors: tuple[Bytes, Bytes] = (NOTHING, NOTHING)
    note: tuple[WeightVersion, int] | None = None
    ready: tuple[bool, bool] = (False, False)


class Early(NamedTuple):
    """What engine 1's pod reads of the registration ``attempt`` of ``version``, which was announced for ``segment``: what ``came``."""

    version: WeightVersion
    segment: str
    attempt: int
    came: tuple[Bytes | None, Bytes | None] = (None, None)


class Trainer(NamedTuple):
    """A trainer's worker. ``at``: ``train``, ``choose``, ``announce``, ``a``, ``b`` (the tensor that it writes next), ``label``, ``look`` (at what is
    published), ``swap``, ``delta`` or ``dead``. ``replaced``: the version, segment and revision that it saw last; ``target``: the buffer that it writes, of the
    shim ``shim``."""

    incarnation: int
    shim: int
    step: int = 0
    at: str = "train"
    state: TrainerState = TrainerState.START
    replaced: tuple[WeightVersion, str, int] | None = None
    target: int = 0


class Engine(NamedTuple):
    """``holds``: the version that it says to hold, and its ``tensors``. While it reads, ``wants`` is the version and segment of the manifest, and
    ``copied`` what has been copied; ``rereads``: how often it began again; ``verified``: what the verifier of several engines has read, and ``revision``
    that of the manifest, for it. Of engine 1: ``pod``, what the shared memory of its pod holds of that version, and ``made``, which tensors a delta has
    made. Of an engine that shares: ``uses``, the segment that it computes with, and ``drawn``, what it has computed with since it began to draw (``None``: it
    does not). ``early``: what its pod has read of a version that is not published."""

    state: RolloutState = RolloutState.START_ENGINE
    holds: WeightVersion | None = None
    tensors: tuple[Bytes, Bytes] = (NOTHING, NOTHING)
    wants: tuple[WeightVersion, str] | None = None
    copied: tuple[Bytes, ...] = ()
    rereads: int = 0
    verified: tuple[Bytes, ...] = ()
    revision: int = 0
    pod: tuple[Bytes, Bytes] = (NOTHING, NOTHING)
    made: tuple[int, ...] = ()
    uses: str = ""
    drawn: tuple[Bytes, ...] | None = None
    early: Early | None = None


class Delta(NamedTuple):
    """What turns the version ``base`` into ``target``, made of the bytes ``before`` and ``after``, of the tensors that have been compared so far. ``is_told``:
    the store names it."""

    base: WeightVersion
    target: WeightVersion
    before: tuple[Bytes, ...] = ()
    after: tuple[Bytes, ...] = ()
    is_told: bool = False


class State(NamedTuple):
    """All of it. ``published``: version and segment in the store, and ``revision``. ``again``: an engine found damage, and the controller has the trainer
    register the same weights again. ``shims``: segments by shim. ``left``: deaths, flips and replacements that may still come. ``delta``: the newest.
    ``announced``: version, segment and registration in the store, of which ``attempts`` were begun."""

    published: tuple[WeightVersion, str] | None
    revision: int
    shims: tuple[tuple[Memory, Memory], ...]
    trainers: tuple[Trainer, ...]
    engines: tuple[Engine, Engine]
    left: tuple[int, int, int]
    again: bool = False
    delta: Delta | None = None
    announced: tuple[WeightVersion, str, int] | None = None
    attempts: int = 0


class Next(NamedTuple):
    """What may come next. ``mixture``: what must never be, and has been reached."""

    action: str
    state: State
    is_fault: bool = False
    mixture: str = ""


def first_state(limits: Limits) -> State:
    return State(None, 0, ((Memory(), Memory()),), (Trainer(1, 0),), (Engine(), Engine()), (limits.deaths, limits.flips, limits.replacements))


def store_of(state: State, protection: Protection, looked: Iterator[None] | None = None) -> MemoryStore:
    entry = None if state.published is None else Entry(KEY, value_of(*state.published), state.revision)
    return MemoryStore(entry, protection.compare_and_swap, looked)


# -- what the trainers do -----------------------------------------------------------------------------------------------


def trainer_moves(state: State, number: int, limits: Limits, protection: Protection) -> Iterator[Next]:
    """``WeightWriter.publish`` of trainer ``number``, one step at a time, and the pod's cycle around it."""
    trainer = state.trainers[number]
    who = f"trainer {trainer.incarnation}"
    own = trainer.shim

    def with_trainer(changed: Trainer, **others: Any) -> State:
        return state._replace(trainers=(*state.trainers[:number], changed, *state.trainers[number + 1 :]), **others)

    def with_memory(target: int, memory: Memory) -> tuple[tuple[Memory, Memory], ...]:
        pair = (memory, state.shims[own][1]) if target == 0 else (state.shims[own][0], memory)
        return (*state.shims[:own], pair, *state.shims[own + 1 :])

    version, memory = WeightVersion(trainer.incarnation, trainer.step), state.shims[own][trainer.target]
    if trainer.at == "dead":
        return
    if trainer.at == "train":
        wants_again = state.again and number == len(state.trainers) - 1
        if trainer.step < limits.steps or wants_again:
            # A step of training that the protocol does not see lies between; weights that were damaged are registered again as they are.
            step = trainer.step - 1 if wants_again and trainer.step else trainer.step
            entered = trainer_goes(trainer.state, TrainerState.OFFLOAD, TrainerState.CONVERT, TrainerState.REGISTER)
            begun = trainer._replace(at="choose", step=step, state=entered)
            yield Next(f"{who} begins step {step}", with_trainer(begun, again=state.again and not wants_again))
        return
    if trainer.at == "choose":
        seen = replaceable(cast(Any, store_of(state, protection)))
        try:
            check_newer(version, None, seen[0] if seen else None)
        except RunError:
            yield Next(f"{who} is refused", with_trainer(trainer._replace(at="dead", state=TrainerState.DOWN)))
            return
        published = seen[0].tensors[0].segment if seen and seen[0] else None
        chosen = trainer._replace(
            at="announce" if limits.early else "a", target=free_buffer(own, published),
            replaced=(seen[0].version, published or "", seen[1]) if seen and seen[0] else None,
        )
        free = state.shims[own][chosen.target]
        bare = free._replace(label=None, note=None, ready=(False, False))
        yield Next(f"{who} takes the label away", with_trainer(chosen, shims=with_memory(chosen.target, bare)))
    elif trainer.at == "announce":
        told = (version, segment_name(own, trainer.target), state.attempts)
        shims = with_memory(trainer.target, memory._replace(note=(version, state.attempts)))
        yield Next(f"{who} announces", with_trainer(trainer._replace(at="a"), shims=shims, announced=told, attempts=state.attempts + 1))
    elif trainer.at in TENSORS:
        tensors = (version, memory.tensors[1]) if trainer.at == "a" else (memory.tensors[0], version)
        changed = trainer._replace(at="b" if trainer.at == "a" else "label")
        ready = (bool(limits.early), memory.ready[1] or (bool(limits.early) and trainer.at == "b"))
        yield Next(f"{who} writes {trainer.at}", with_trainer(changed, shims=with_memory(trainer.target, memory._replace(tensors=tensors, ready=ready))))
    elif trainer.at == "label":
        after = "look" if trainer.replaced is None else "swap"
        yield Next(f"{who} labels", with_trainer(trainer._replace(at=after), shims=with_memory(trainer.target, memory._replace(label=version))))
    elif trainer.at == "look":
        seen = None if state.published is None else (*state.published, state.revision)
        yield Next(f"{who} looks at what is published", with_trainer(trainer._replace(at="swap", replaced=seen)))
    elif trainer.at == "delta":
        yield _writes_delta(state, trainer, with_trainer)
    else:
        after = _publishes(state, trainer, version, with_trainer, protection)
        yield _begins_delta(after, number) if limits.deltas and after.action.endswith("publishes") else after


def _begins_delta(after: Next, number: int) -> Next:
    """The controller has the trainer's shim make a delta when a version is published."""
    trainer = after.state.trainers[number]
    old, new = (after.state.shims[trainer.shim][place].label for place in (1 - trainer.target, trainer.target))
    if old is None or new is None or old == new:
        return after._replace(state=after.state._replace(delta=None))
    trainers = (*after.state.trainers[:number], trainer._replace(at="delta"), *after.state.trainers[number + 1 :])
    return after._replace(state=after.state._replace(trainers=trainers, delta=Delta(old, new)))


def _writes_delta(state: State, trainer: Trainer, with_trainer: Any) -> Next:
    """``DeltaWriter.write`` of the trainer's shim, a tensor at a time."""
    who, delta = f"the shim of trainer {trainer.incarnation}", state.delta
    if delta is None or (delta.target.incarnation, delta.target.step) != (trainer.incarnation, trainer.step - 1):
        # Another trainer has made one meanwhile, in another shim.
        return Next(f"{who} gives its delta up", with_trainer(trainer._replace(at="train")))
    old, new = state.shims[trainer.shim][1 - trainer.target], state.shims[trainer.shim][trainer.target]
    if len(delta.after) < len(TENSORS):
        i = len(delta.after)
        longer = delta._replace(before=(*delta.before, old.tensors[i]), after=(*delta.after, new.tensors[i]))
        return Next(f"{who} compares {TENSORS[i]}", with_trainer(trainer, delta=longer))
    is_kept = label_says(old.label, delta.base) and label_says(new.label, delta.target)
    return Next(f"{who} tells of its delta", with_trainer(trainer._replace(at="train"), delta=delta._replace(is_told=True) if is_kept else None))


def _publishes(state: State, trainer: Trainer, version: WeightVersion, with_trainer: Any, protection: Protection) -> Next:
    known, segment = None, segment_name(trainer.shim, trainer.target)
    store = store_of(state, protection, iter([None] if trainer.replaced is None else []))
    if trainer.replaced is not None:
        before, where, revision = trainer.replaced
        known = (manifest_of(before, where), revision)
    try:
        revision = publish(cast(Any, store), manifest_of(version, segment), known)
    except LooksAgain:
        return Next(f"trainer {trainer.incarnation} is too late", with_trainer(trainer._replace(at="look", replaced=None)))
    except RunError:
        return Next(f"trainer {trainer.incarnation} is refused", with_trainer(trainer._replace(at="dead", state=TrainerState.DOWN)))
    entered = trainer_goes(trainer.state, TrainerState.UPDATE_WEIGHT, TrainerState.WAIT_ROLLOUT, TrainerState.ONLOAD, TrainerState.TRAIN)
    changed = trainer._replace(at="train", step=trainer.step + 1, state=entered, replaced=None)
    mixture = ""
    if state.published is not None and version < state.published[0]:
        mixture = f"engines: {tuple(version)} was published after {tuple(state.published[0])}, so engines that ask for the newest get different ones"
    after = with_trainer(changed, published=(version, segment), revision=revision)
    return Next(f"trainer {trainer.incarnation} publishes", after, mixture=mixture)


# -- what the engines do ------------------------------------------------------------------------------------------------


def engine_moves(state: State, number: int, limits: Limits, protection: Protection) -> Iterator[Next]:
    """``WeightReader.read`` or ``view`` (engine 0) or ``transport.fetch`` (engine 1), one tensor at a time, then ``Engine.update_weights`` and a rollout."""
    engine, who = state.engines[number], f"engine {number}"

    def with_engine(changed: Engine, **others: Any) -> State:
        engines = (changed, state.engines[1]) if number == 0 else (state.engines[0], changed)
        return state._replace(engines=engines, **others)

    if engine.state is RolloutState.DOWN:
        yield Next(f"{who} is started", with_engine(Engine(rollout_goes(RolloutState.DOWN, RolloutState.START_ENGINE))))
        return
    if engine.drawn is not None:
        yield _draws(state, engine, with_engine, protection)
        return
    if engine.wants is None:
        if number == 1 and limits.early:
            yield from _reads_early(state, engine, with_engine)
        if engine.uses and engine.state is RolloutState.UPDATE_WEIGHT:
            yield Next(f"{who} begins to draw", with_engine(engine._replace(drawn=())))
        elif engine.holds is not None and engine.state is RolloutState.UPDATE_WEIGHT:
            yield Next(f"{who} draws samples", with_engine(engine._replace(state=rollout_goes(engine.state, RolloutState.ROLLOUT))))
        if state.published is not None and state.published[0] != engine.holds:
            manifest, _ = read_manifest(*state.published, state.revision)
            through = [RolloutState.KEEP_ENGINE] if engine.state is RolloutState.ROLLOUT else []
            begun = engine._replace(
                state=rollout_goes(engine.state, *through, RolloutState.UPDATE_WEIGHT), wants=(manifest.version, manifest.tensors[0].segment), copied=(),
                revision=state.revision if number == 0 and limits.once else 0,
            )
            yield Next(f"{who} reads the manifest", with_engine(begun))
        return
    version, segment = engine.wants
    shim, place = place_of(segment)
    memory, none = state.shims[shim][place], engine._replace(wants=None, copied=(), made=(), rereads=0, early=None)
    if number == 0 and limits.once:
        yield _verified_once(state, engine, memory, with_engine, protection)
        return
    if len(engine.copied) < len(TENSORS):
        came = None if engine.early is None else engine.early.came[len(engine.copied)]
        if engine.early is not None and came is not None:
            is_in = not protection.early or is_in_early(version, len(engine.copied), engine.early.version, came)
            if is_in:
                yield Next(f"{who} has it early", with_engine(engine._replace(copied=(*engine.copied, came))))
                return
        if number == 1 and protection.label and not label_says(memory.label, version):
            yield Next(f"{who} is told that the version has moved", with_engine(none))
            return
        if number == 1 and (made := _made(state, engine, version, protection)) is not None:
            yield Next(f"{who} applies the delta", with_engine(made))
            return
        yield Next(f"{who} copies", with_engine(engine._replace(copied=(*engine.copied, memory.tensors[len(engine.copied)]))))
        return
    after = _verified(state, number, engine, version, with_engine, none, protection)
    if number == 0 and limits.shares and after.action.endswith("holds it"):
        if protection.held and not label_says(memory.label, version):
            yield Next("engine 0 finds that they were published again", with_engine(none))
            return
        after = after._replace(state=with_engine(after.state.engines[0]._replace(uses=segment)))
    yield after


def _reads_early(state: State, engine: Engine, with_engine: Any) -> Iterator[Next]:
    """``EarlyReading`` of the pod of engine 1: begins with what is announced, and reads a tensor that the server has marked, while the note is that one."""
    early = engine.early
    if state.announced is not None and (early is None or early.attempt != state.announced[2]):
        version, segment, attempt = state.announced
        if engine.holds is None or engine.holds < version:
            yield Next("engine 1 follows the announcement", with_engine(engine._replace(early=Early(version, segment, attempt))))
    if early is None:
        return
    shim, place = place_of(early.segment)
    memory = state.shims[shim][place]
    for i, name in enumerate(TENSORS):
        if early.came[i] is None and memory.ready[i] and note_says(memory.note, early.version, early.attempt):
            came = (memory.tensors[0], early.came[1]) if i == 0 else (early.came[0], memory.tensors[1])
            yield Next(f"engine 1 reads {name} early", with_engine(engine._replace(early=early._replace(came=came))))


def _draws(state: State, engine: Engine, with_engine: Any, protection: Protection) -> Next:
    """``Engine.step`` of engine 0 with shared weights: it computes with one tensor after the other, and then looks at the label of their segment. A bit
    that flips meanwhile flips in a private copy as well, and is not the protocol's."""
    shim, place = place_of(engine.uses)
    memory, drawn = state.shims[shim][place], engine.drawn or ()
    assert engine.holds is not None
    if len(drawn) < len(TENSORS):
        return Next("engine 0 computes", with_engine(engine._replace(drawn=(*drawn, memory.tensors[len(drawn)]))))
    if protection.held and not label_says(memory.label, engine.holds):
        return Next("engine 0 finds its memory written to", with_engine(Engine(rollout_goes(engine.state, RolloutState.ROLLOUT, RolloutState.DOWN))))
    mixture = ""
    if {each for each in drawn if each != DAMAGED} - {engine.holds}:
        mixture = f"engine: it draws from {', '.join(str(tuple(each)) for each in drawn)} as {tuple(engine.holds)}"
    return Next("engine 0 draws samples", with_engine(engine._replace(drawn=None, state=rollout_goes(engine.state, RolloutState.ROLLOUT))), mixture=mixture)


def _made(state: State, engine: Engine, version: WeightVersion, protection: Protection) -> Engine | None:
    """``LocalParts.fill`` with a delta: the next tensor from what the pod holds; ``None`` where it is read whole."""
    delta, i = state.delta, len(engine.copied)
    if delta is None or not delta.is_told or not delta_leads_to(delta.target, version) or engine.holds != delta.base:
        return None
    tensor = delta.after[i] if engine.pod[i] == delta.before[i] else DAMAGED
    if protection.delta and digest(TENSORS[i], tensor) != digest(TENSORS[i], version):
        return None
    return engine._replace(copied=(*engine.copied, tensor), made=(*engine.made, i))


def _verified_once(state: State, engine: Engine, memory: Memory, with_engine: Any, protection: Protection) -> Next:
    """``WeightReader.view`` and what the engine makes of it, then ``PublishedVerifier.verify`` and ``confirm_weights``; the other way round without
    ``protection.after``."""
    assert engine.wants is not None
    # Its memory is written to from here on, and it says that it holds nothing.
    version, none = engine.wants[0], engine._replace(wants=None, copied=(), verified=(), revision=0, holds=None, tensors=(NOTHING, NOTHING))
    verified, is_taken = engine.verified, len(engine.copied) == len(TENSORS)
    if not is_taken and (protection.after or len(verified) == len(TENSORS)):
        taken = (*engine.copied, memory.tensors[len(engine.copied)])
        if protection.after or len(taken) < len(TENSORS):
            return Next("engine 0 takes", with_engine(engine._replace(copied=taken, holds=None)))
        return _confirmed(engine._replace(copied=taken), none, with_engine)
    if len(verified) < len(TENSORS):
        return Next("the verifier reads", with_engine(engine._replace(verified=(*verified, memory.tensors[len(verified)]))))
    if protection.revision and (state.revision != engine.revision or not label_says(memory.label, version)):
        return Next("the verifier finds that they were published again", with_engine(none))
    entries = manifest_of(*engine.wants).tensors
    if protection.digest and not all(digest(entry.name, each) == entry.parts[0].digest for entry, each in zip(entries, verified, strict=True)):
        is_current = protection.repair and engine.wants == state.published
        return Next("the verifier reports damage", with_engine(none, again=state.again or is_current))
    return _confirmed(engine, none, with_engine)


def _confirmed(engine: Engine, none: Engine, with_engine: Any) -> Next:
    assert engine.wants is not None
    version, held, mixture = engine.wants[0], cast(tuple[Bytes, Bytes], engine.copied), ""
    if set(held) != {version}:
        mixture = f"engine: it draws from {', '.join(str(tuple(each)) for each in held)} as {tuple(version)}"
    return Next("engine 0 holds it", with_engine(none._replace(holds=version, tensors=held)), mixture=mixture)


def _verified(state: State, number: int, engine: Engine, version: WeightVersion, with_engine: Any, none: Engine, protection: Protection) -> Next:
    who, mixture = f"engine {number}", ""
    if number == 1 and len({each for each in engine.copied if each != DAMAGED}) > 1:
        mixture = f"transfer: bytes of {', '.join(str(tuple(each)) for each in engine.copied)} were accepted as one version"
    entries = manifest_of(*engine.wants).tensors if engine.wants else ()
    right = all(
        digest(entry.name, each) == entry.parts[0].digest or (i in engine.made and not protection.delta)
        for i, (entry, each) in enumerate(zip(entries, engine.copied, strict=True))
    )
    none = none._replace(made=())
    if right or not protection.digest:
        held = cast(tuple[Bytes, Bytes], engine.copied)
        if set(held) != {version}:
            mixture = mixture or f"engine: it draws from {', '.join(str(tuple(each)) for each in held)} as {tuple(version)}"
        return Next(f"{who} holds it", with_engine(none._replace(holds=version, tensors=held, pod=held if number else none.pod)), mixture=mixture)
    if engine.rereads == 0 and state.published is not None:
        # From the manifest on.
        manifest, _ = read_manifest(*state.published, state.revision)
        again = engine._replace(wants=(manifest.version, manifest.tensors[0].segment), copied=(), made=(), rereads=1, early=None)
        return Next(f"{who} reads again", with_engine(again), mixture=mixture)
    is_current = protection.repair and state.published is not None and engine.wants == state.published
    return Next(f"{who} reports damage", with_engine(none, again=state.again or is_current), mixture=mixture)


# -- what happens to them -----------------------------------------------------------------------------------------------


def faults(state: State, limits: Limits) -> Iterator[Next]:
    """Deaths, replacements of a trainer that still runs, and flipped bits; and what ``recovery`` does about a dead trainer, which is no fault."""
    deaths, flips, replacements = state.left
    newest = state.trainers[-1]
    restart = Trainer(newest.incarnation + 1, newest.shim, max(newest.step - 1, 0), state=trainer_goes(TrainerState.DOWN, TrainerState.START))
    if newest.at == "dead":
        # It repeats the newest step, whose weights may never have been registered.
        yield Next("the trainer is started again", state._replace(trainers=(*state.trainers[:-1], restart), again=False))
    elif deaths:
        dead = newest._replace(at="dead", state=TrainerState.DOWN)
        yield Next("the trainer dies", state._replace(trainers=(*state.trainers[:-1], dead), left=(deaths - 1, flips, replacements)), True)
    if replacements and newest.at != "dead":
        other = restart._replace(shim=len(state.shims))
        replaced = state._replace(
            trainers=(*state.trainers, other), shims=(*state.shims, (Memory(), Memory())), left=(deaths, flips, replacements - 1), again=False
        )
        yield Next("the trainer is replaced while it runs", replaced, True)
    if deaths:
        for number, engine in enumerate(state.engines):
            if engine.state is not RolloutState.DOWN:
                gone = Engine(rollout_goes(engine.state, RolloutState.DOWN))
                engines = (gone, state.engines[1]) if number == 0 else (state.engines[0], gone)
                yield Next(f"engine {number} dies", state._replace(engines=engines, left=(deaths - 1, flips, replacements)), True)
    if flips and state.published is not None:
        shim, place = place_of(state.published[1])
        memory = state.shims[shim][place]
        pair = list(state.shims[shim])
        pair[place] = memory._replace(tensors=(DAMAGED, memory.tensors[1]))
        shims = (*state.shims[:shim], cast(tuple[Memory, Memory], tuple(pair)), *state.shims[shim + 1 :])
        yield Next("a bit flips", state._replace(shims=shims, left=(deaths, flips - 1, replacements)), True)
        if limits.early:
            yield from _flips_early(state)
        if limits.deltas and state.engines[1].holds is not None:
            flipped = state.engines[1]._replace(pod=(DAMAGED, state.engines[1].pod[1]))
            yield Next("a bit of the other pod flips", state._replace(engines=(state.engines[0], flipped), left=(deaths, flips - 1, replacements)), True)


def _flips_early(state: State) -> Iterator[Next]:
    """A bit flips in the first tensor of what is announced, after it was written."""
    deaths, flips, replacements = state.left
    for shim, pair in enumerate(state.shims):
        for place, memory in enumerate(pair):
            if memory.ready[0] and memory.label is None:
                flipped = memory._replace(tensors=(DAMAGED, memory.tensors[1]))
                changed = (flipped, pair[1]) if place == 0 else (pair[0], flipped)
                shims = (*state.shims[:shim], changed, *state.shims[shim + 1 :])
                yield Next("a bit flips in what is announced", state._replace(shims=shims, left=(deaths, flips - 1, replacements)), True)


def moves(state: State, limits: Limits, protection: Protection) -> Iterator[Next]:
    """Everything that may come next."""
    for number in range(len(state.trainers)):
        yield from trainer_moves(state, number, limits, protection)
    for number in range(len(state.engines)):
        yield from engine_moves(state, number, limits, protection)
    yield from faults(state, limits)


def is_goal(state: State) -> bool:
    """Whether the newest trainer has nothing left to do, and both engines hold what is published, as it was written."""
    if state.published is None or state.again:
        return False
    version = state.published[0]
    return state.trainers[-1].incarnation == version.incarnation and all(
        engine.holds == version and set(engine.tensors) == {version} and engine.wants is None for engine in state.engines
    )
