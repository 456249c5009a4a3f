"""DeepSpeed's ZeRO optimizer behind the trainer's interface of optimizers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tandem.backends.collective_errors import collectives_of
from tandem.backends.deepspeed.fragments import fragments_of
from tandem.trainer.offload.pages import WEIGHTS
from tandem.trainer.optimizers.adamw import MOMENTS
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.zero import Part


class DeepSpeedOptimizer:
    """The optimizer of a DeepSpeed ``engine`` with ZeRO ``stage`` over named ``parameters``, on this rank of ``ranks``. DeepSpeed sums the gradients
    over the ranks, clips and updates; this counts updates and gives names to what it holds."""

    kinds = MOMENTS

    def __init__(self, engine: Any, stage: int, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.stage, self.updates = dict(parameters), stage, 0
        self._engine, self._zero, self._ranks = engine, engine.optimizer, ranks
        self._fragments = {fragment.name: fragment for fragment in fragments_of(self._zero, stage, self.parameters, ranks.data.rank)}
        self._is_offloaded = bool(self._zero.offload_optimizer if stage == 3 else self._zero.cpu_offload)
        self._has_gradients = False

    # -- a step ------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drops all gradients, those that a step was not taken with too."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if not self._has_gradients:
            return
        self._has_gradients = False
        # As DeepSpeed leaves out a step whose gradient is not finite.
        if self._is_offloaded:
            zero.reset_cpu_buffers()
        elif self.stage == 3:
            zero.averaged_gradients = {}
        else:
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        zero.micro_step_id = 0 if self.stage == 3 else -1

    def clip(self, scale: float = 1.0) -> float:
        """Returns the norm of the global gradient, which ``step`` clips; the gradient must not be scaled."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        assert scale == 1.0, "DeepSpeed's own loss scale is not used"
        self._has_gradients = True
        zero = self._zero
        with collectives_of("DeepSpeed", "the gradient norm", self._ranks):
            norm = float(combine_grad_norm_groups(zero._get_norm_groups()) if self.stage == 3 else zero.scaled_global_norm())
        # DeepSpeed's norm of a gradient that is not finite is -1.
        return norm if norm >= 0 else float("nan")

    def step(self, learning_rate: float) -> None:
        """Clips, updates this rank's part of every parameter, and brings the parts of all ranks together under ZeRO 1 and 2."""
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        with collectives_of("DeepSpeed", "the update of weights", self._ranks):
            self._engine.step()
        self.updates, self._has_gradients = self.updates + 1, False

    # -- the state ---------------------------------------------------------------------------------------------------

    def parts(self, form: bool = False) -> Iterator[Part]:
        """Yields the live elements that this rank updates: of every parameter a run of its weights and, after the first update, of its moments. ``form``:
        as after an update, with ``values`` on the ``meta`` device."""
        groups, state = self.flat_weights(), self._zero.optimizer.state
        for fragment in self._fragments.values():
            flat = groups[fragment.group]
            for kind in (WEIGHTS, *(MOMENTS if form or self.updates else ())):
                held = flat if kind == WEIGHTS or form else state[flat][kind]
                yield Part(kind, fragment.name, fragment.first, fragment.of(held.to("meta") if form else held))

    @torch.no_grad()
    def load_parts(self, parts: Iterable[Part], updates: int) -> None:
        """Loads the ``parts`` of an optimizer whose ranks hold the same fragments, and gives their weights to the network."""
        inner, groups = self._zero.optimizer, self.flat_weights()
        states = inner.state
        states.clear()
        for flat in groups if updates else ():
            # torch counts updates in a tensor, DeepSpeed's own AdamW in a number.
            count = torch.tensor(float(updates)) if isinstance(inner, torch.optim.AdamW) else updates
            states[flat] = {"step": count, **{kind: torch.zeros_like(flat) for kind in MOMENTS}}
        if not isinstance(inner, torch.optim.AdamW):
            _count(inner, updates)
        for part in parts:
            fragment = self._fragments[part.name]
            flat = groups[fragment.group]
            fragment.of(flat if part.kind == WEIGHTS else states[flat][part.kind]).copy_(part.values)
        self.updates = updates
        self._publish()

    def _publish(self) -> None:
        """Copies the fp32 weights that are updated to those that the network computes with."""
        if self.stage < 3:
            self._zero._hp_optimizer_states_linked = False
            with collectives_of("DeepSpeed", "the loading of weights", self._ranks):
                self._zero.update_lp_params()
            return
        for group in range(len(self.flat_weights())):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)

    # -- what it holds -----------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """Returns this rank's live part of parameter ``name``."""
        fragment = self._fragments[name]
        return fragment.of(self.flat_weights()[fragment.group])

    def flat_weights(self) -> list[Tensor]:
        """Returns the flat fp32 tensors that this rank updates."""
        flat: list[Tensor] = self._zero.fp32_partitioned_groups_flat if self.stage == 3 else self._zero.single_partition_of_fp32_groups
        return flat

    def flat_moments(self) -> list[Tensor]:
        """Returns the moments of the flat tensors; none before the first update."""
        states = self._zero.optimizer.state
        return [states[flat][kind] for flat in self.flat_weights() for kind in MOMENTS if kind in states.get(flat, {})]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's part of the summed gradients, between the last backward pass and the step."""
        if self._is_offloaded:
            yield from ((f"group {number}", flat.grad) for number, flat in enumerate(self.flat_weights()) if flat.grad is not None)
            return
        for number, held in self._zero.averaged_gradients.items():
            yield from ((f"group {number}, tensor {place}", gradient) for place, gradient in enumerate(held or ()))


def _count(adam: Any, updates: int) -> None:
    """Takes DeepSpeed's own AdamW to where it is after ``updates`` updates: it multiplies the powers of its betas step by step, and a power that it computes at
    once, in its first step, differs from those in the last bit."""
    (beta1, beta2), nothing = adam.param_groups[0]["betas"], torch.zeros(1)
    for step in range(1, updates + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, nothing, nothing, nothing.clone(), nothing.clone())
