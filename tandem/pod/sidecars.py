"""The two sidecars as the pod's controller sees them: what can be asked of each, typed.

Whether a call crosses two processes or none is the channel's business (``tandem.pod.channel``).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.layout.residents import Phase, Residency
from tandem.pod.calls import InferencePart
from tandem.pod.channel import Channel
from tandem.runtime.coordination.store import Guard
from tandem.runtime.rpc.calls import Meta, Progress
from tandem.runtime.traces.context import untraced
from tandem.types import Prompt, Sample, Score, WeightVersion
from tandem.types.wire_records import SamplesEncoder, decode_samples, encode_prompts, encode_samples, encode_scores, samples_from_text

NO_TIERS: Meta = {"memory": None, "local": None, "recorded": None}
"""No tier before the run's folder."""
OnSamples = Callable[[Sequence[Sample]], None]


@dataclass(frozen=True, slots=True)
class TrainerSidecar:
    """The figure's Megatron sidecar. ``encode``: of samples; what ``train`` has sent it forgets."""

    channel: Channel
    encode: SamplesEncoder = field(default_factory=SamplesEncoder)

    def create_model(self, folder: Path) -> None:
        """Make the model that the recipe describes as ``folder``, once."""
        self.channel.call("create_model", {"folder": str(folder)})

    def load(
        self, start: Path, step: int | None, residency: Residency, prefetch: Collection[Phase], tiers: Meta = NO_TIERS, *, may_fetch: bool = False
    ) -> dict[str, Any]:
        """Load checkpoint ``step`` or the newest before it (``None``: the newest that is whole), or the folder ``start`` if there is none. The
        reference model is ``start``; residents are moved as ``residency`` says, and read ahead at the end of the phases ``prefetch``. Returns the
        ``step`` and ``digest`` of what was loaded, why others were passed over, and the name of the ``kernels``. ``tiers``: those before the run's folder,
        as of ``NearTiers.describe``; ``may_fetch``: whether a copy is fetched where there is no other; ``tier`` of the reply says what was read."""
        meta = {**asdict(residency), "start": str(start), "step": step, "prefetch": sorted(prefetch), "tiers": dict(tiers), "may_fetch": may_fetch}
        return self.channel.call("load", meta).meta

    def measure(self, products: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The speed of matrix ``products`` on the ranks (``kernels.measure``)."""
        return self.channel.call("measure", {"products": [list(each) for each in products]}).meta

    def inference(self, step: int, samples: Sequence[Sample], *, part: InferencePart = "all", returns_reference: bool = False) -> dict[str, Any]:
        """The ``part`` for the update: the reference model's log-probabilities of ``samples`` and the critic's values, kept by the worker for ``train``. The
        part of the rewards: returns the ``scores`` of the reward model and with ``returns_reference`` the ``reference_logprobs`` of each sample's tokens."""
        meta = {"step": step, "part": part, "returns_reference": returns_reference}
        return self.channel.call("inference", meta, {"samples": self.encode(samples)}).meta

    def compare(self, samples: Sequence[Sample]) -> dict[str, float]:
        """``mismatch_kl`` and ``mismatch_max_abs`` of ``samples``, which the weights that the actor has now drew."""
        metrics: dict[str, float] = self.channel.call("compare", {}, {"samples": encode_samples(samples)}).meta["metrics"]
        return metrics

    def train(
        self, step: int, samples: Sequence[Sample], scores: Sequence[Score], on_progress: Progress | None = None
    ) -> dict[str, Any]:
        """One optimizer step from the state after ``step`` steps; returns its ``metrics``, the guard's ``verdict`` and the checkpoints that
        were ``committed`` meanwhile, and the ``entropies`` of the samples' tokens (``encode_entropies``; none where they are missing)."""
        blobs = {"samples": self.encode(samples), "scores": encode_scores(scores)}
        self.encode.forget()
        frame = self.channel.call("train", {"step": step}, blobs, on_progress=on_progress)
        return {**frame.meta, "entropies": frame.blobs.get("entropies", b"")}

    def offload(self, step: int, release: bool) -> dict[str, Any]:
        """Drop gradients and caches, and begin to move away what a rollout does not need; with ``release`` give the memory back to the machine.
        Returns the ``moves`` that ended."""
        return self.channel.call("offload", {"step": step, "release": release}).meta

    def prefetch(self, step: int, phase: Phase) -> None:
        """Begin to bring back what ``phase`` needs."""
        self.channel.call("prefetch", {"step": step, "phase": str(phase)})

    def onload(self, step: int, phase: Phase) -> dict[str, Any]:
        """Bring what ``phase`` needs; returns the ``moves``."""
        return self.channel.call("onload", {"step": step, "phase": str(phase)}).meta

    def convert(self, step: int) -> dict[str, Any]:
        return self.channel.call("convert", {"step": step}).meta

    def register(self, version: WeightVersion, buffers: Sequence[str], guard: Guard | None = None, *, announces: bool = False) -> dict[str, Any]:
        """Write the converted weights to the one of ``buffers`` that is free and publish their manifest; then the actor follows what ``offload`` has
        begun to move. ``guard``: that of the manifest. ``announces``: other pods are told of each part when it is written (``receive_early``). Returns the
        ``bytes`` that were published, the ``moves`` that ended and the ``residue`` of the training before."""
        meta = {"version": list(version), "buffers": list(buffers), "guard": guard, "announces": announces}
        return self.channel.call("register", meta).meta

    def serve_weights(
        self, store: str, protocols: Sequence[str] = ("tcp",), *, host: str = "127.0.0.1", port: int = 0, advertised: str = ""
    ) -> dict[str, int]:
        """Let other pods with the same credential read what is registered, over any of ``protocols``; where, the run's ``store`` (an address, see
        ``open_store``) says. ``advertised``: the host that they connect to, ``host`` if empty. Returns the ports by protocol."""
        meta = {"store": store, "protocols": list(protocols), "host": host, "port": port, "advertised": advertised}
        ports: dict[str, int] = self.channel.call("serve_weights", meta).meta["ports"]
        return ports

    def write_delta(self, store: str, full_every: int, weights_url: str = "") -> dict[str, Any]:
        """Make the element-wise delta from the version before to the published one, for other pods, unless the step is a multiple of ``full_every``, and begin
        to write the version to ``weights_url``. Returns its ``bytes`` (0: there is none), the ``stored_bytes``, the ``seconds`` and the ``trouble``, if any."""
        return self.channel.call("write_delta", {"store": store, "full_every": full_every, "weights_url": weights_url}).meta

    def save(self, step: int, in_use: Collection[int], tiers: Meta = NO_TIERS) -> dict[str, Any]:
        """Begin the checkpoint of ``step``, in ``tiers`` too; those of steps ``in_use`` are not removed for it. Returns (step, digest) of those that were
        ``committed`` meanwhile, and what was ``written`` to tiers."""
        return self.channel.call("save", {"step": step, "in_use": sorted(in_use), "tiers": dict(tiers)}).meta

    def copy_checkpoint(self, step: int, only: Collection[str], tiers: Meta) -> dict[str, Any]:
        """Begin the checkpoint of ``step`` in the tiers ``only`` and not in the run's folder, unless one is being written. Returns what ``save`` does, and
        whether it was ``begun``."""
        return self.channel.call("copy_checkpoint", {"step": step, "only": sorted(only), "tiers": dict(tiers)}).meta

    def finish_save(self) -> dict[str, Any]:
        """Wait for the checkpoint that is under way. Returns what ``save`` does."""
        return self.channel.call("finish_save").meta

    def export(self, folder: Path, critic: Path, draft: Path) -> None:
        """Write the actor as a Hugging Face folder, once, and a critic of its own as ``critic``."""
        self.channel.call("export", {"folder": str(folder), "critic": str(critic), "draft": str(draft)})

    def forget_local(self) -> None:
        """Removes the run's checkpoints from the local disks of the ranks' machines."""
        self.channel.call("forget_local")

    def memory(self) -> dict[str, int]:
        with untraced():
            return self.channel.memory()


@dataclass(frozen=True, slots=True)
class RolloutSidecar:
    """The figure's vLLM sidecar."""

    channel: Channel

    def start_engine(self, folder: Path, kernels: str, *, reads_weights: bool = False, adapter: Path | None = None) -> dict[str, Any]:
        """Start the worker's engine for the model in ``folder`` and the trainer's ``kernels``. Returns ``kv_cache_bytes``, and the ``base_bytes`` of the
        weights that it read from the folder: 0 unless updates hold an adapter alone. ``reads_weights``: it begins with those of the folder, and with
        ``adapter``, a folder of PEFT, instead of with dummy weights."""
        meta = {"folder": str(folder), "kernels": kernels, "reads_weights": reads_weights, "adapter": None if adapter is None else str(adapter)}
        return self.channel.call("start_engine", meta).meta

    def weight_digests(self) -> list[list[dict[str, str]]]:
        """The digests of the weights that engines hold, computed from their memory: for each worker and each of its ranks, by their names there."""
        digests: list[list[dict[str, str]]] = self.channel.call("weight_digests").meta["digests"]
        return digests

    def verify_engines(self, step: int) -> None:
        """Compares what the engines hold with what they were given. Raises ``SidecarDied``, with its name, if a tensor has changed in an engine's memory."""
        self.channel.call("verify_engine", {"step": step})

    def receive_early(self, version: WeightVersion) -> bool:
        """Let the other pods begin to read ``version`` as soon as its registration begins, part by part, and return at once. Returns whether any does."""
        return bool(self.channel.call("receive_early", {"version": list(version)}).meta["pods"])

    def receive_weights(
        self, store: str, own_store: str, version: WeightVersion | None, protocols: Sequence[str] = (), *, deadline_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Bring ``version`` (``None``: the newest) from the pod that the run's ``store`` names to this pod's shared memory, and publish it in this pod's
        ``own_store``, where ``update_weight`` finds it, over the fastest of ``protocols`` (empty: all that this machine has) that the other pod offers.
        Returns its ``version``, ``bytes``, the ``protocol``, the tensors that were altered on the way and read again (``rereads``), how often a connection
        broke (``breaks``) and the ``seconds``."""
        wanted = None if version is None else list(version)
        meta = {"store": store, "own_store": own_store, "version": wanted, "protocols": list(protocols), "deadline_s": deadline_s}
        return self.channel.call("receive_weights", meta, on_progress=on_progress).meta

    def update_weight(self, version: WeightVersion) -> dict[str, Any]:
        """Read, verify and apply the weights published as ``version``; a sleeping engine allocates its KV cache. Returns the tensors that were
        read twice (``rereads``), with several pods those that were ``left_out``, the ``kv_cache_bytes``, the ``base_bytes`` that were read from the
        model's folder again and the ``seconds`` of waking."""
        return self.channel.call("update_weight", {"version": list(version)}).meta

    def rollout(
        self, step: int, prompts: Sequence[Prompt], settings: dict[str, Any], *, weights: int, unfinished: Sequence[Sample] = (),
        expected: Sequence[float] = (), restarts_left: int = 0, on_progress: Progress | None = None, on_samples: OnSamples | None = None,
    ) -> tuple[list[Sample], dict[str, Any]]:
        """Samples of ``prompts`` for ``step``, group by group in their order, the counts of ``drafts`` and with several workers their ``busy_share``.
        ``settings`` are sampling settings, the group size and the purpose. ``weights``: the step of those that the engine holds. Of a prompt that has
        ``unfinished`` samples only these are continued. ``expected``: tokens that the longest sample of each prompt may have, as far as its past says so.
        ``restarts_left``: how many of several workers may be replaced. ``on_samples`` receives each sample as soon as it is finished, and again if it is
        drawn again."""

        drawn: dict[str, Sample] = {}

        def heard(progress: dict[str, Any]) -> None:
            if "samples" in progress and on_samples is not None:
                finished = samples_from_text(progress["samples"])
                drawn.update((sample.id, sample) for sample in finished)
                on_samples(finished)
            elif "samples" not in progress and on_progress is not None:
                on_progress(progress)

        meta = {"step": step, "weights": weights, "settings": settings, "expected": list(expected) or [0.0] * len(prompts), "restarts_left": restarts_left}
        blobs = {"prompts": encode_prompts(prompts), "unfinished": encode_samples(unfinished)}
        reply = self.channel.call("rollout", {**meta, "stream": on_samples is not None}, blobs, on_progress=heard)
        place = {prompt.id: number for number, prompt in enumerate(prompts)}
        # Those that were streamed are not sent again, unless they have changed.
        drawn.update((sample.id, sample) for blob in reply.blobs.values() for sample in decode_samples(blob))
        return sorted(drawn.values(), key=lambda sample: (place[sample.prompt_id], sample.index)), reply.meta

    def sleep_engine(self, level: int = 2) -> dict[str, Any]:
        """Free the engine's KV cache and at ``level`` 2 its weights, and keep its process. Returns the ``left_bytes`` of its KV cache, which should be 0."""
        return self.channel.call("sleep_engine", {"level": level}).meta

    def terminate_engine(self) -> None:
        """End the worker's process and everything it holds."""
        self.channel.stop_worker()

    def memory(self) -> dict[str, int]:
        with untraced():
            return self.channel.memory()
