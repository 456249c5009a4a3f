"""The hybrid deployment: two sidecars and the weights between them.

They take turns, or one step off the rollout of the next step lasts while the trainer works. The pod knows the figure's states and the journal, no
algorithm and no task. Every transition is checked, timed, journalled and announced. ``recovery`` replaces a sidecar that dies.
"""

import contextlib
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tandem.config.pods import PodsConfig
from tandem.config.rewards import INFERRED_COLUMNS
from tandem.layout.residents import KEEP, Phase, Residency
from tandem.pod.calls import InferencePart
from tandem.pod.failures import SidecarDied
from tandem.pod.leadership import Fence
from tandem.pod.pod_checkpoints import PodCheckpoints
from tandem.pod.pod_news import PodNews
from tandem.pod.residents.moves import ResidentMoves, engine_moves
from tandem.pod.restarts import Restarts
from tandem.pod.rollout_ahead import Drawn, RolloutAhead
from tandem.pod.sidecars import OnSamples, RolloutSidecar, TrainerSidecar
from tandem.pod.states import RolloutState, TrainerState
from tandem.pod.transitions import Transitions
from tandem.runtime.health.run_health import RunHealth
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.records.agreements import record_agreement
from tandem.runtime.records.entropies import EntropyFile
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_records import Records
from tandem.runtime.rpc.calls import Progress
from tandem.runtime.traces.spans import span
from tandem.runtime.traces.steps import STEP
from tandem.trainer.corruption.finding import CorruptionFinding, SilentCorruption
from tandem.types import DamagedWeights, Prompt, Round, RunError, Sample, Score, WeightVersion

PREFETCH_SHARE = 0.75
"""The share of the prompts that are done when what follows the rollout is read ahead: the rest is the long tail."""


@dataclass
class Pod:
    """Two sidecars, their states and the weights between them.

    ``start``: the folder of the model before the first step, which is the reference model too. ``segment_bytes``: of one of
    the two weight buffers. ``trained_on``: what the journal has that a step was trained on.

    ``fence``: gives the guard of the weights that are published. ``shared_store``: the address of the store in which other pods find them; empty: there
    are none. ``pods``: how they are served to them. ``verify_every``: the steps between two comparisons of the engines' memory
    with what they were given; 0: none. ``health``: records what holds up the ranks, and what is wrong with nodes.
    ``check_inputs`` verifies what a trainer reads besides checkpoints, whenever one starts, and raises ``RunError``.

    ``trainer_step``: optimizer steps that the trainer's worker has taken (``None``: it is down). ``published``: the version of the weights in the buffers
    (``None``: none, or those of a dead trainer). ``registered``: (step, digest) of the weights that were registered last; ``learned_step``: the weights after
    this many steps differ from those before, because the optimizer moved them (-1: no step did). ``engine_step``: the step
    of the weights that the engine holds (``None``: dummy weights, or no engine). ``ahead``: a rollout that lasts while the trainer works;
    ``hidden_s``: seconds of such rollouts for which nobody waited. ``online``: the trainer's working memory
    is there. ``infers``: a rollout is followed by passes of frozen models. ``residency``: what is where in which phase; at the end of the phases
    ``prefetch`` the next one's residents are read. ``moves``: their moves; ``engine_bytes``: of the engine's residents.

    ``memory``: resident bytes by phase; ``device_metrics``: rank 0's speed and peak memory in the last update; ``rollout_metrics``: of
    the last rollout, how several rollout workers were used and how many draft tokens were accepted. ``records`` times and shows
    each phase; ``journal`` is theirs.
    """

    trainer: TrainerSidecar
    rollout: RolloutSidecar
    start: Path
    segment_bytes: int
    journal: Journal
    trained_on: Callable[[int], Round]
    records: Records
    checkpoints: PodCheckpoints
    max_restarts: int
    residency: Residency = KEEP
    prefetch: frozenset[Phase] = frozenset()
    infers: bool = False
    incarnation: int = 0
    kernels: str = ""
    buffers: tuple[str, ...] = ()
    base_bytes: int = 0
    trainer_step: int | None = None
    published: WeightVersion | None = None
    registered: tuple[int, str] | None = None
    learned_step: int = -1
    engine_step: int | None = None
    ahead: RolloutAhead | None = None
    hidden_s: float = 0.0
    online: bool = False
    check_inputs: Callable[[], None] = lambda: None
    fence: Fence = lambda: None
    shared_store: str = ""
    verify_every: int = 0
    health: RunHealth | None = None
    entropies: EntropyFile | None = None
    pods: PodsConfig = field(default_factory=PodsConfig)
    memory: dict[str, float] = field(default_factory=dict)
    device_metrics: dict[str, float] = field(default_factory=dict)
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    engine_bytes: dict[str, int] = field(default_factory=dict)
    news: PodNews = field(init=False)
    transitions: Transitions = field(init=False)
    restarts: Restarts = field(init=False)
    moves: ResidentMoves = field(init=False)

    def __post_init__(self) -> None:
        callback = self.records.callback
        self.transitions, self.restarts = Transitions(self.records), Restarts(self.journal, callback, self.max_restarts)
        self.news, self.moves = PodNews(self.journal, callback), ResidentMoves(self.journal, callback, self.residency.plan != "keep")

    # -- starting and stopping ---------------------------------------------------------------------------------------

    def start_trainer(self, step: int | None = None) -> int:
        """Bring up the trainer's sidecar at checkpoint ``step`` (``None``: the newest); returns the step of the state it loaded."""
        with self.transitions.trainer_does(TrainerState.START, step or 0):
            self.check_inputs()
            self.trainer.channel.start()
            self.incarnation = self.journal.next_incarnation()
            near = self.checkpoints.near
            may_fetch = bool(near.copies) and bool(self.journal.checkpoints())
            loaded = self.trainer.load(self.start, step, self.residency, self.prefetch, near.describe(self.incarnation, loads=True), may_fetch=may_fetch)
            if self.kernels not in ("", loaded["kernels"]):
                was, now = self.kernels, loaded["kernels"]
                raise RunError(f"the trainer computed with kernels {was} and now with {now}, so its bits would differ; repair the compiler, then resume")
            self.trainer_step, self.kernels, self.online = int(loaded["step"]), str(loaded["kernels"]), True
            self.checkpoints.note_loaded(loaded)
            self.buffers = self.trainer.channel.allocate(self.segment_bytes)
            if self.shared_store and self.pods.are_several:
                self.trainer.serve_weights(self.shared_store, self.pods.protocols, host=self.pods.host, port=self.pods.port)
        for note in loaded["notes"]:
            self.news.tell_once(note)
        self.checkpoints.tell_of_loaded(loaded, is_newest=step is None)
        return self.trainer_step

    def start_engine(self, step: int) -> None:
        """Bring up the rollout sidecar: with dummy weights, or with those that an adapter is trained for."""
        with self.transitions.rollout_does(RolloutState.START_ENGINE, step) as detail:
            self.rollout.channel.start()
            started = self.rollout.start_engine(self.start, self.kernels)
            self.engine_bytes["kv_cache"], self.engine_step = int(started["kv_cache_bytes"]), None
            self._note_base(started, detail)

    def export(self, folder: Path, critic: Path, draft: Path) -> None:
        """Write the actor as a Hugging Face folder, and a critic of its own as ``critic``."""
        self.trainer.export(folder, critic, draft)

    def close(self) -> None:
        """End both sidecars and everything they own."""
        self.rollout.channel.close()
        self.trainer.channel.close()

    # -- the cycle ---------------------------------------------------------------------------------------------------

    def has_weights(self, step: int) -> bool:
        """Returns whether ``serve_weights`` can be asked for ``step``."""
        return step in (self.engine_step, self.trainer_step, None if self.published is None else self.published.step)

    def serve_weights(self, step: int) -> None:
        """The engine holds the weights after ``step`` optimizer steps and the trainer is out of its way:
        offload -> convert -> register -> update weight."""
        if self.engine_step == step and not (self.online and self.trainer_step == step):
            return
        self.rest_engine(step)
        if self.trainer_step != step:
            self._serve_published(step)
            return
        with self.transitions.trainer_does(TrainerState.OFFLOAD, step) as detail:
            detail.update(self.moves.note(step, self.trainer.offload(step, release=self.residency.rule.engine != "stays")))
            self.online = False
        with self.transitions.trainer_does(TrainerState.CONVERT, step):
            self.trainer.convert(step)
        version = WeightVersion(self.incarnation, step)
        self._register(version)
        if self.transitions.rollout in (RolloutState.DOWN, RolloutState.TERMINATE_ENGINE):
            self.start_engine(step)
        try:
            self._update_weight(version)
        except DamagedWeights as damage:
            self.news.note_damage(step, str(damage), "registering them again")
            self._register(version)
            self._update_weight(version)
        self.transitions.trainer_enters(TrainerState.WAIT_ROLLOUT, step)

    def _serve_published(self, step: int) -> None:
        """The engine holds again the weights that were published before the trainer took its newest step."""
        assert self.published is not None and self.published.step == step, (self.published, self.trainer_step, step)
        if self.transitions.rollout is RolloutState.DOWN:
            self.start_engine(step)
        try:
            self._update_weight(self.published, trainer_waits=False)
        except DamagedWeights as damage:
            self.news.note_damage(step, str(damage), "the trainer returns to them")
            raise SidecarDied("trainer", "worker", f"the weights after {step} steps were damaged after they were published") from None

    def _register(self, version: WeightVersion) -> None:
        with self.transitions.trainer_does(TrainerState.REGISTER, version.step) as detail:
            announces = self.pods.are_several and self.pods.pipeline != "never" and self.rollout.receive_early(version)
            detail.update(self.moves.note(version.step, self.trainer.register(version, self.buffers, self.fence(), announces=announces)))
            self._check_changed(version.step, str(detail["digest"]))
            self.engine_bytes["engine_weights"], self.published = self.base_bytes + int(detail["bytes"]), version
            if self.pods.elementwise_deltas:
                self._write_delta(version.step, detail)

    def _write_delta(self, step: int, detail: dict[str, Any]) -> None:
        made = self.trainer.write_delta(self.shared_store, self.pods.full_update_every, self.pods.weights_url)
        detail.update(delta_bytes=made["bytes"], delta_seconds=made["seconds"])
        if self.pods.weights_url:
            detail["stored_bytes"] = made["stored_bytes"]
        if made["trouble"]:
            self.records.callback.message(f"step {step}: other pods read whole weights, because their delta could not be made: {made['trouble']}")

    def _check_changed(self, step: int, digest: str) -> None:
        """Raises ``RunError`` if the weights of ``step`` were registered with the ``digest`` of those before, although the trainer has learned since: an
        engine would draw from old weights, and no digest would tell."""
        before, self.registered = self.registered, (step, digest)
        if before is not None and before[1] == digest and before[0] < self.learned_step <= step:
            raise RunError(
                f"the weights of step {step} were registered with the digest of those of step {before[0]} ({digest}), although the trainer took step "
                f"{self.learned_step - 1}: the update did not reach them. If trainer.learning_rate is too small to change a weight of trainer.dtype, raise it; "
                "otherwise this is a defect, please report it with logs/trainer_worker.log"
            )

    def _note_base(self, reply: dict[str, Any], detail: dict[str, Any]) -> None:
        """Journals what engines have read of the weights that no update holds."""
        if reply["base_bytes"]:
            self.base_bytes = detail["base_bytes"] = int(reply["base_bytes"])

    def _update_weight(self, version: WeightVersion, *, trainer_waits: bool = True) -> None:
        step = version.step
        waits = self.transitions.trainer_does(TrainerState.UPDATE_WEIGHT, step) if trainer_waits else contextlib.nullcontext()
        with waits, self.transitions.rollout_does(RolloutState.UPDATE_WEIGHT, step) as detail:
            began, was_empty = monotonic(), self.engine_step is None
            updated = self.rollout.update_weight(version)
            rereads, self.engine_step = updated["rereads"], step
            detail.update({key: updated[key] for key in ("early_bytes",) if key in updated})
            for each in updated.get("left_out", ()):
                self.restarts.note(step, each)
            for each in updated.get("members", ()):
                self.news.note_member(step, each)
            self._note_base(updated, detail)
            if was_empty:
                waking = float(updated["seconds"])
                seconds = {"engine_weights": monotonic() - began - waking, "kv_cache": waking}
                detail.update(self.moves.note(step, {"moves": engine_moves(self.engine_bytes, "instantiate", seconds)}))
        if rereads:
            self.news.note_damage(step, f"tensor '{rereads[0]}' and {len(rereads) - 1} more did not have their digests", "they were read again")

    def roll_out(
        self, step: int, prompts: Sequence[Prompt], settings: dict[str, Any], state: RolloutState = RolloutState.ROLLOUT, *, weights: int | None = None,
        unfinished: Sequence[Sample] = (), expected: Sequence[float] = (), on_samples: OnSamples | None = None,
    ) -> list[Sample]:  # fmt: skip
        """Samples of ``prompts`` for ``step`` under the weights after ``weights`` steps (``None``: ``step``). ``unfinished``, ``expected``, ``on_samples``:
        as of ``RolloutSidecar.rollout``."""
        weights = step if weights is None else weights
        self.serve_weights(weights)
        ahead = state is RolloutState.ROLLOUT and Phase.ROLLOUT in self.prefetch

        def report(progress: dict[str, Any]) -> None:
            nonlocal ahead
            if self.restarts.note(step, progress):
                return
            self.records.callback.progress(state, progress["done"], progress["total"], "prompts")
            if ahead and progress["done"] >= PREFETCH_SHARE * progress["total"]:
                ahead = False
                self._prefetch(step)

        with self.transitions.rollout_does(state, step):
            samples, facts = self.rollout.rollout(
                step, prompts, settings, weights=weights, unfinished=unfinished, expected=expected, restarts_left=self.restarts.left, on_progress=report,
                on_samples=on_samples,
            )
            self._verify_engines(step)
        self._note_rollout(facts, self.rollout.memory())
        self._measure("wait_rollout", self.trainer.memory())
        return samples

    def begin_rollout(
        self, step: int, prompts: Sequence[Prompt], settings: dict[str, Any], *, weights: int, expected: Sequence[float] = (),
        on_samples: OnSamples | None = None,
    ) -> None:
        """Begins to draw samples of ``prompts`` for ``step`` under the weights after ``weights`` steps, while the trainer goes on. Arguments as of
        ``roll_out``; ``on_samples`` is called in another thread."""
        self.serve_weights(weights)
        transition, left = self.transitions.rollout_begins(RolloutState.ROLLOUT, step), self.restarts.left

        def draw(report: Progress) -> Drawn:
            with transition, span(RolloutState.ROLLOUT, {STEP: step, "tandem.sidecar": "rollout"}):
                samples, facts = self.rollout.rollout(
                    step, prompts, settings, weights=weights, expected=expected, restarts_left=left, on_progress=report, on_samples=on_samples
                )
                self._verify_engines(step)
            return samples, {**facts, "memory": self.rollout.memory()}

        self.ahead = RolloutAhead(step, draw, in_thread=self.rollout.channel.is_remote)

    def end_rollout(self) -> list[Sample]:
        """Waits for the rollout that was begun, and returns its samples. Raises ``SidecarDied`` if the sidecar died in it."""
        assert self.ahead is not None
        ahead, self.ahead = self.ahead, None
        try:
            samples, facts = ahead.result()
        finally:
            for each in ahead.lost:
                self.restarts.note(ahead.step, each)
        self.records.add_time("rollout", ahead.seconds)
        self.records.add_time("rollout_tail", ahead.waited_s)
        self.hidden_s += ahead.seconds - ahead.waited_s
        self._note_rollout(facts, facts["memory"])
        return samples

    def _verify_engines(self, step: int) -> None:
        """Raises ``SidecarDied`` if the samples of ``step`` were drawn from weights that had changed in an engine's memory: they are drawn again."""
        if self.verify_every and step % self.verify_every == 0:
            self.rollout.verify_engines(step)

    def rest_engine(self, step: int) -> None:
        """The engine draws no more, and keeps what it holds."""
        if self.transitions.rollout in (RolloutState.ROLLOUT, RolloutState.EVALUATE):
            self.transitions.rollout_enters(RolloutState.KEEP_ENGINE, step)

    def _note_rollout(self, facts: dict[str, Any], memory: dict[str, int]) -> None:
        self.rollout_metrics = {"perf/rollout_busy_share": float(facts["busy_share"])} if "busy_share" in facts else {}
        self.rollout_metrics |= {f"perf/rollout_groups/{pod}": float(count) for pod, count in facts.get("groups_of_pods", {}).items()}
        proposals, proposed, accepted = facts["drafts"]
        if proposals:
            self.rollout_metrics |= {"perf/spec_accept_rate": accepted / proposed, "perf/spec_accept_length": 1 + accepted / proposals}
        self._measure("rollout", memory)

    def _prefetch(self, step: int) -> None:
        """Begins to bring back what follows the rollout. A trainer that dies of it is seen by the next call."""
        if not self.online:
            with contextlib.suppress(SidecarDied):
                self.trainer.prefetch(step, Phase.INFERENCE if self.infers else Phase.TRAIN)

    def hand_over(self, step: int, phase: Phase) -> None:
        """The trainer's turn: keep the engine, put it to sleep or terminate it, then bring what the trainer needs in ``phase``."""
        if self.online:
            return
        rule = self.residency.rule
        if rule.engine == "ends":
            with self.transitions.rollout_does(RolloutState.TERMINATE_ENGINE, step) as detail:
                detail.update(self._engine_frees(step, self.rollout.terminate_engine))
        elif rule.engine == "sleeps":
            with self.transitions.rollout_does(RolloutState.SLEEP_ENGINE, step) as detail:
                detail.update(self._engine_frees(step, self.rollout.sleep_engine))
        elif self.ahead is None:
            self.rest_engine(step)
        self.onload(step, phase)

    def onload(self, step: int, phase: Phase) -> None:
        """Bring what the trainer needs in ``phase``."""
        with self.transitions.trainer_does(TrainerState.ONLOAD, step) as detail:
            detail.update(self.moves.note(step, self.trainer.onload(step, phase)))
            self.online = True

    def infer(
        self, step: int, samples: Sequence[Sample], needs: Collection[str] = (), part: InferencePart = "all"
    ) -> tuple[list[float] | None, dict[str, list[Any]]]:
        """The other models' passes over ``samples``; what they give for the update stays with the trainer's worker. Returns the reward model's scores
        (``None``: there is no such model, or ``part`` is that of the update), and for reward functions the columns of the models that they need, a value for
        each sample."""
        self.hand_over(step, Phase.INFERENCE)
        with self.transitions.trainer_does(TrainerState.INFERENCE, step) as detail:
            inferred = self.trainer.inference(step, samples, part=part, returns_reference="reference" in needs)
            scores: list[float] | None = inferred.pop("scores")
            outputs = {"reference": inferred.pop("reference_logprobs"), "reward_model": scores}
            detail.update(self.moves.note(step, inferred))
        self._measure("inference", self.trainer.memory())
        return scores, {INFERRED_COLUMNS[model]: values for model in needs if (values := outputs[model]) is not None}

    def compare(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns the mismatch of ``samples``, which the weights after ``step`` steps drew."""
        self.hand_over(step, Phase.TRAIN)
        with self.transitions.trainer_does(TrainerState.INFERENCE, step):
            return self.trainer.compare(samples)

    def train(self, step: int, samples: Sequence[Sample], scores: Sequence[Score]) -> dict[str, float]:
        """One optimizer step; returns its metrics. Raises ``SilentCorruption``."""
        self.hand_over(step, Phase.TRAIN)
        with self.transitions.trainer_does(TrainerState.TRAIN, step) as detail:
            report = lambda progress: self.records.callback.progress("train", progress["done"], progress["total"], "micro-batches")
            trained = self.trainer.train(step, samples, scores, on_progress=report)
            times = [_placed(RankTimes.from_json(each)) for each in trained.pop("step_times", [])]
            nodes = trained.pop("nodes", {})
            if "corruption" in trained:
                raise SilentCorruption(CorruptionFinding.from_json(trained["corruption"]).on(nodes))
            if trained.get("compared"):
                record_agreement(self.journal, step, trained["compared"])
            self.trainer_step = step + 1
            if trained["learned"]:
                self.learned_step = step + 1
            detail.update(self.moves.note(step, {name: trained.pop(name, []) for name in ("moves", "residue")}))
        if self.health is not None:
            self.health.look(step, times)
        self._measure("train", self.trainer.memory())
        if self.entropies is not None:
            self.entropies.write(step, trained["entropies"])
        self.device_metrics = trained["device"]
        self.checkpoints.commit(trained)
        metrics: dict[str, float] = trained["metrics"]
        if trained["verdict"] == "skipped":
            what = f"step {step}: the gradient norm is {metrics['actor/grad_norm']}: the update is left out"
            self.journal.record_event("skipped_step", {"step": step, "grad_norm": str(metrics["actor/grad_norm"])})
            if trained["exhausted"]:
                raise RunError(
                    f"{what}, {trained['exhausted']} steps in a row, more than trainer.max_skipped_steps: training has diverged; lower "
                    "trainer.learning_rate or lengthen its warm-up"
                )
            self.records.callback.message(what)
        return metrics

    def checkpoint(self, step: int) -> None:
        """Begin the checkpoint of the state after ``step`` optimizer steps, once; a resume starts from the newest that was committed."""
        if self.checkpoints.has_begun(step):
            return
        self.hand_over(step, Phase.TRAIN)
        with self.transitions.trainer_does(TrainerState.CHECKPOINT, step):
            self.checkpoints.begin(step)
            saved = self.trainer.save(step, self.checkpoints.in_use(), self.checkpoints.near.describe(self.incarnation))
        self.checkpoints.commit(saved)

    def copy_checkpoint(self, step: int, tiers: Collection[str]) -> None:
        """Begin the checkpoint of the state after ``step`` optimizer steps in ``tiers``, before the run's folder, once."""
        if step == self.checkpoints.copied_step:
            return
        self.hand_over(step, Phase.TRAIN)
        with self.transitions.trainer_does(TrainerState.CHECKPOINT, step) as detail:
            copied = self.trainer.copy_checkpoint(step, tiers, self.checkpoints.near.describe(self.incarnation))
            detail["tiers"] = sorted(tiers) if copied["begun"] else []
        if copied["begun"]:
            self.checkpoints.copied_step = step
        self.checkpoints.commit(copied)

    def finish_checkpoints(self) -> None:
        """Wait for the checkpoint that is under way, if one is."""
        if self.checkpoints.boundaries:
            self.checkpoints.commit(self.trainer.finish_save())

    def _engine_frees(self, step: int, free: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Frees the engine's residents; returns the detail for the journal."""
        began = monotonic()
        left = (free() or {}).get("left_bytes", 0)
        self.engine_step = None
        share = (monotonic() - began) / len(self.engine_bytes)
        residue = [f"kv_cache should be absent and holds {left / 2**20:,.1f} MiB"] if left else []
        return self.moves.note(step, {"moves": engine_moves(self.engine_bytes, "destroy", dict.fromkeys(self.engine_bytes, share)), "residue": residue})

    def _measure(self, phase: str, measured: dict[str, int]) -> None:
        # The shared weight buffers are resident in trainer and engine alike; the plan counts them once, as segments.
        self.memory[phase] = float(measured["rss_bytes"] - measured["shm_bytes"])


def _placed(times: RankTimes) -> RankTimes:
    """Returns ``times`` with a machine: this one, unless they are those of a rank elsewhere."""
    return times if times.node else times.on(socket.gethostname(), "127.0.0.1")
