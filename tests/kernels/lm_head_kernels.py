"""The chunked implementations of the LM head by name, for tests and for the processes that they measure."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tandem.kernels import select
from tandem.kernels.mixed import MixedKernels
from tandem.kernels.reference import ReferenceKernels
from tandem.model.parallel.vocabulary_parallel import Head, vocabulary_logprobs


class OneRank:
    """The communicator of a group of one."""

    rank, size = 0, 1

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        return x.unsqueeze(0)

    def all_reduce(self, x: Tensor, name: str) -> Tensor:
        return x


class VocabularyRanks:
    """``Kernels.token_logprobs`` by ``vocabulary_logprobs``, with all token ids on one rank."""

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        parallel: Any = SimpleNamespace(tensor=OneRank(), shard_spec=SimpleNamespace(deterministic=False))
        head = Head(weight, 0, len(weight), len(weight))
        return vocabulary_logprobs(select("cpu"), parallel, hidden, head, targets, temperature)


def kernels_named(name: str) -> Any:
    if name in ("bf16", "fp16", "fp8"):
        return MixedKernels(select("cpu"), name, emulated=True)  # type: ignore[arg-type]
    if name == "triton":
        from triton_interpreter import interpreted

        return interpreted()
    made: dict[str, Any] = {"cpu": lambda: select("cpu"), "reference": ReferenceKernels, "tensor ranks": VocabularyRanks}
    return made[name]()
