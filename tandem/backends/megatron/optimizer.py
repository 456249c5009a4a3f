"""Megatron-Core's AdamW as the optimizer of a training step, and where its state is."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.backends.megatron.groups import named
from tandem.backends.megatron.network import named_biases, named_parameters
from tandem.trainer.optimizers.adamw import MOMENTS
from tandem.trainer.parallel.ranks import Ranks


class OwnRun(NamedTuple):
    """The elements of ``parameter`` from ``first`` on that this rank updates: all of them, or under the distributed optimizer a run. ``weights``: the fp32
    tensor that the inner optimizer updates, in bf16 a copy of the parameter; ``inner``: that optimizer (``None``: a router's bias, which none updates)."""

    parameter: str
    first: int
    weights: Tensor
    inner: Any


class MegatronOptimizer:
    """``chained``: Megatron's optimizers of the dense and of the experts' parameters of the stages ``network``, which steps treat as one."""

    def __init__(self, network: Sequence[Any], chained: Any, ranks: Ranks) -> None:
        self.network, self.chained, self.ranks = network, chained, ranks
        self.updates = 0

    def zero_grad(self) -> None:
        """Sets all gradients to 0: their memory is Megatron's for the life of the process."""
        for stage in self.network:
            stage.zero_grad_buffer()
        self.chained.zero_grad()

    def clip(self, scale: float = 1.0) -> float:
        """Clips the summed gradients by their global norm, as Megatron does; returns the norm before it."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        assert scale == 1.0, "the loss is scaled with trainer.precision fp16 alone, which is refused"
        with named("the gradient norm", self.ranks):
            self.chained.prepare_grads()
            norm = float(self.chained.get_grad_norm())
        if math.isfinite(norm) and self.chained.config.clip_grad > 0:
            for each in self.chained.chained_optimizers:
                clip_grad_by_total_norm_fp32(each.get_parameters(), max_norm=each.config.clip_grad, total_norm=norm)
        return norm

    def step(self, learning_rate: float) -> None:
        """Updates every parameter; ranks that divide the optimizer's state gather the new weights."""
        for group in self.chained.param_groups:
            # Megatron's scheduler would set both.
            group["lr"], group["weight_decay"] = learning_rate, self.chained.config.weight_decay * group["wd_mult"]
        with named("the update of weights", self.ranks):
            self.chained.step_with_ready_grads()
        self.updates += 1

    def runs(self) -> Iterator[OwnRun]:
        """Yields what this rank updates, and the biases with which routers choose experts."""
        names = {parameter: name for name, parameter in named_parameters(self.network)}
        for each in self.chained.chained_optimizers:
            if hasattr(each, "model_param_group_index_map"):
                for parameter, (group, place) in each.model_param_group_index_map.items():
                    first = each._get_model_param_range_map(parameter)["param"].start
                    yield OwnRun(names[parameter], first, each.optimizer.param_groups[group]["params"][place], each.optimizer)
                continue
            of_main = {getattr(parameter, "main_param", parameter): name for parameter, name in names.items()}
            for weights in each.get_parameters():
                yield OwnRun(of_main[weights], 0, weights, each.optimizer)
        yield from (OwnRun(name, 0, bias, None) for name, bias in named_biases(self.network))

    def publish(self) -> None:
        """Gives the weights that were written to ``runs`` to the network, on all ranks. Every rank calls it."""
        for each in self.chained.chained_optimizers:
            if hasattr(each, "_copy_main_params_to_model_params"):
                each._copy_main_params_to_model_params()
        if self.chained.config.use_distributed_optimizer:
            with named("the loading of weights", self.ranks):
                for stage in self.network:
                    stage.start_param_sync()

    def moments(self) -> Iterator[tuple[str, OwnRun, Tensor]]:
        """Yields the moments that there are, by kind; those of a router's bias are 0, as in checkpoints of Tandem's trainer."""
        for run in self.runs():
            if run.inner is None:
                yield from ((kind, run, torch.zeros_like(run.weights)) for kind in MOMENTS if self.updates)
                continue
            state = run.inner.state.get(run.weights, {})
            yield from ((kind, run, state[kind]) for kind in MOMENTS if kind in state)

    def make_moments(self, updates: int) -> None:
        """Makes empty moments as they are after ``updates`` updates, to be filled; none after 0."""
        self.updates = updates
        for run in (each for each in self.runs() if each.inner is not None):
            run.inner.state.pop(run.weights, None)
            if updates:
                count = torch.tensor(float(updates))
                run.inner.state[run.weights] = {"step": count, **{kind: torch.zeros_like(run.weights) for kind in MOMENTS}}
