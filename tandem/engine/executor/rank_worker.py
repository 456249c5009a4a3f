"""A tensor-parallel rank other than rank 0: ``python -m tandem.engine.executor.rank_worker --threads N --channel FD``."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tandem.engine.executor.forward import forward
from tandem.engine.executor.model_input import input_to_device
from tandem.engine.executor.rank_weights import RankWeights
from tandem.engine.executor.ranks import RankSettings
from tandem.engine.executor.step_message import decode_step
from tandem.engine.kv_cache.cache_tensors import apply_moves, host_pool, make_cache
from tandem.kernels import CacheLayer
from tandem.layout.sharding import local_parameters
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_parts
from tandem.model.lora import Adapter, AdapterStacks, LoraBatch, stack
from tandem.model.parallel.tensor_parallel import RankGroup
from tandem.model.weight_digests import weight_digests
from tandem.runtime.machine.heap import give_back
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.types import RunError, WeightSource, WeightVersion

logger = logging.getLogger(__name__)


class RankWorker:
    """Answers the calls of ``Ranks``, in the order in which it makes them."""

    settings: RankSettings
    group: RankGroup
    decoder: Decoder
    caches: list[CacheLayer]
    host: list[CacheLayer]
    adapters: list[Adapter | None]
    lora_stacks: AdapterStacks
    hidden: torch.Tensor
    weights: RankWeights | None = None

    def methods(self) -> Mapping[str, Method]:
        names = (
            "hello", "join", "load", "allocate", "fill_slot", "step", "logits", "update_weights", "read_weights", "apply_weights", "held_digests",
        )  # fmt: skip
        return {name: self._method(getattr(self, name)) for name in names}

    @staticmethod
    def _method(function: Any) -> Method:
        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            try:
                answer = function(meta, blobs)
            except (RuntimeError, RunError) as error:
                # An exchange fails when another rank has died; rank 0 determines which one.
                logger.exception("a call failed")
                raise RunError(f"a rank could not continue: {str(error).splitlines()[0]}") from None
            return answer or {}, {}

        return call

    def hello(self, meta: Meta, blobs: Blobs) -> None:
        """Replies once all imports are done."""

    def join(self, meta: Meta, blobs: Blobs) -> None:
        self.settings = RankSettings.read(meta["settings"])
        self.group = self.settings.join(int(meta["rank"]), Path(meta["rendezvous"]))

    def load(self, meta: Meta, blobs: Blobs) -> None:
        self.decoder = self.settings.load(self.group)
        self.decoder.pack()
        self.adapters, self.lora_stacks = [], AdapterStacks([], {})

    def allocate(self, meta: Meta, blobs: Blobs) -> None:
        """Allocates the KV cache and its swap space."""
        self.caches = make_cache(self.decoder, int(meta["num_blocks"]), meta["kv_cache_dtype"], int(meta["state_rows"]))
        self.host = host_pool(self.caches, int(meta["swap_blocks"]), int(meta["swap_states"]))

    def step(self, meta: Meta, blobs: Blobs) -> None:
        device = self.decoder.embed_tokens.device
        step = decode_step(meta, blobs)
        batch = input_to_device(step.batch, device)
        if step.adapted is not None:
            batch = batch._replace(lora=LoraBatch(self.lora_stacks, *(part.to(device) for part in step.adapted)))
        with torch.inference_mode():
            apply_moves(self.caches, self.host, step.moves)
        self.hidden = forward(self.decoder, self.caches, batch, step.draws, step.scores).hidden

    @torch.inference_mode()
    def logits(self, meta: Meta, blobs: Blobs) -> None:
        """Takes part in computing the logits of rows ``first`` to ``last - 1`` of the last step."""
        self.decoder.logits(self.hidden[meta["first"] : meta["last"]])

    def fill_slot(self, meta: Meta, blobs: Blobs) -> None:
        decoder = self.decoder
        like = decoder.embed_tokens.detach()
        pairs: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, module, *shapes in meta["matrices"]:
            a, b = (torch.empty(shape, device=like.device) for shape in shapes)
            pairs[layer, module] = (a, b)
        self.group.receive([matrix for pair in pairs.values() for matrix in pair])
        if len(self.adapters) != meta["slots"]:
            self.adapters = [None] * meta["slots"]
        self.adapters[meta["slot"]] = Adapter(meta["r"], pairs, "") if pairs else None
        self.lora_stacks = stack(self.adapters, decoder.shapes, decoder.kernels, meta["max_rank"], like, decoder.shard_spec)

    def update_weights(self, meta: Meta, blobs: Blobs) -> None:
        device = self.decoder.embed_tokens.device
        held = dict(local_parameters(self.decoder.shapes, self.decoder.shard_spec))
        parts = {name: torch.empty(held[name], dtype=getattr(torch, dtype), device=device) for name, dtype in meta["dtypes"].items()}
        self.group.receive(list(parts.values()))
        load_parts(self.decoder, parts, pack=True)

    def read_weights(self, meta: Meta, blobs: Blobs) -> dict[str, Any]:
        source = WeightSource(**meta["source"])
        if self.weights is None or self.weights.source != source:
            self.weights = RankWeights(self.decoder, source)
        return self.weights.answer(WeightVersion(*meta["version"]))

    def apply_weights(self, meta: Meta, blobs: Blobs) -> None:
        assert self.weights is not None
        had_own = self.weights.shared is None
        self.weights.apply()
        if had_own and self.weights.shared is not None:
            # The C library would keep the memory of the weights that this rank had of its own.
            give_back()

    def held_digests(self, meta: Meta, blobs: Blobs) -> dict[str, Any]:
        return {**weight_digests(self.decoder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    serve(RankWorker().methods(), options.channel)


if __name__ == "__main__":
    main()
