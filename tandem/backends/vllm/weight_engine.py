"""vLLM's side of a weight update: a ``WeightTransferEngine`` that reads published weights from shared memory. Runs inside vLLM.

The update has two phases, so that the ranks of an engine never hold two versions. ``/update_weights`` copies and verifies, ``/finish_weight_update`` applies
what all ranks have verified. After it the weights that the model computes with are read back and compared.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tandem.backends.vllm.held_weights import digest, held_weights, shard_of
from tandem.config.load import build
from tandem.config.lora import LoraConfig
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.peft_folder import merged_tensors
from tandem.model.huggingface.stacked_matrices import MatrixStacks
from tandem.runtime.coordination.open import open_store
from tandem.runtime.rpc.calls import PeerDied
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.weight_transfer.update import WeightReader, Weights


@dataclass
class StoreInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``store``: the address of the store in which weights are published. ``threads``: that read them. ``lora``: section ``trainer.lora`` of the recipe, if
    what is published is an adapter of the weights in the model's folder."""

    store: str
    threads: int
    lora: dict[str, Any] | None = None


@dataclass
class VersionInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to read."""

    incarnation: int
    step: int


class PublishedWeights(WeightTransferEngine):  # type: ignore[misc]
    """Reads versions that ``tandem.weight_transfer`` has published. ``outcome``: of the last ``/update_weights``, a plain value: ``error`` (class and text;
    ``None``: everything was verified), ``bytes``, ``rereads`` and the ``revision`` of the publication. ``digests``: of what was held after the last update, by
    name."""

    init_info_cls = StoreInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.source: StoreInfo | None = None
        self.reader: WeightReader | None = None
        self.staged: Weights | None = None
        self.outcome: dict[str, Any] = {}
        self.digests: dict[str, str] = {}

    def init_transfer_engine(self, init_info: StoreInfo) -> None:
        """Notes where weights are published."""
        self.source = init_info

    def start_weight_update(self) -> None:
        """Opens the store. A reader is made for each update, so that its copy of the weights is freed when they are applied, and no digest is taken as known
        from an update before."""
        assert self.source is not None, "/init_weight_transfer_engine comes first"
        self.drop()
        self.reader = WeightReader(open_store(self.source.store), self.source.threads)

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Copies the version out of shared memory and verifies all of it; nothing is applied. What goes wrong is in ``outcome``, since vLLM would end the
        update on this rank alone."""
        assert self.reader is not None, "/start_weight_update comes first"
        try:
            self.staged = self.reader.read(WeightVersion(update_info.incarnation, update_info.step))
        except (DamagedWeights, RunError, PeerDied) as error:
            self.outcome = {"error": [type(error).__name__, str(error)], "bytes": 0, "rereads": [], "revision": 0}
        else:
            self.outcome = {"error": None, "bytes": self.staged.size_bytes, "rereads": list(self.staged.rereads), "revision": self.staged.revision}

    def drop(self) -> None:
        """Frees what was read."""
        self.staged = None
        if self.reader is not None:
            self.reader.close()
            self.reader.store.close()
            self.reader = None

    def finish_weight_update(self) -> None:
        """Applies what was read, and compares it with what the model holds then. Raises ``RuntimeError`` if they differ: the engine must be ended."""
        weights = self.staged
        if weights is None:
            return
        published = self._of_folder(dict(weights.tensors))
        initialize_layerwise_reload(self.model)
        with torch.device(self.device):
            self.model.load_weights(iter(published.items()))
            finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_head()
        self._pack_experts()
        self.digests = self._compare(published)
        del weights, published
        self.drop()

    def _of_folder(self, published: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the whole weights by the names of the model's folder: with an adapter those of the folder, to which it is added, each rounded once."""
        assert self.source is not None
        if self.source.lora is not None:
            adapted = adapted_shapes(self._shapes, build(LoraConfig, self.source.lora))
            published = dict(merged_tensors(dict(read_tensors(Path(self.model_config.model))), published, adapted))
        return dict(self._stacks.renamed(published.items()))

    @cached_property
    def _shapes(self) -> ModelShapes:
        return read_shapes(Path(self.model_config.model))

    @cached_property
    def _stacks(self) -> MatrixStacks:
        """How the folder names tensors, read once and not in the pause of each update."""
        return MatrixStacks(self._shapes)

    def _pack_tied_head(self) -> None:
        """Packs the head again: a reload packs only what it loads, and a tied head is loaded as the embedding."""
        head: Any = getattr(self.model, "lm_head", None)
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)

    def _pack_experts(self) -> None:
        """Packs the experts again: a reload leaves them as they were published, and the kernel reads them as packed."""
        for layer in self.model.modules():
            if hasattr(layer, "w13_weight"):
                layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _compare(self, published: dict[str, Tensor]) -> dict[str, str]:
        """Returns the digests of what is held. Raises ``RuntimeError`` where it is not the part of ``published`` that belongs to this rank."""
        rank, ranks = self.vllm_config.parallel_config.rank, self.parallel_config.tensor_parallel_size
        missing, digests = set(published), dict[str, str]()
        for held in held_weights(self.model):
            digests[held.name] = digest(held.tensor)
            if not held.published:
                continue
            if held.published not in published:
                raise RuntimeError(f"vLLM holds '{held.name}', which was not published")
            missing.discard(held.published)
            try:
                part = shard_of(published[held.published], held.tensor.shape, rank % ranks, ranks, is_padded=held.is_padded)
            except ValueError as error:
                raise RuntimeError(f"vLLM's tensor '{held.name}' is no part of the published one: {error}") from None
            if digests[held.name] != digest(part.to(held.tensor.dtype)):
                raise RuntimeError(f"vLLM's tensor '{held.name}' is not the one that was published")
        if missing:
            raise RuntimeError(f"vLLM has not taken '{min(missing)}', which was published")
        return digests

    def held_digests(self) -> dict[str, str]:
        """Returns the digests of what the model holds now."""
        return {held.name: digest(held.tensor) for held in held_weights(self.model)}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which also waits for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        """Frees what was read."""
        self.drop()
