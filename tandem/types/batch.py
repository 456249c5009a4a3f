"""What the trainer trains on: sequences with a value for every token, as plain data."""

from dataclasses import dataclass

from tandem.types.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence, prompt and completion together.

    ``token_ids``: prompt then completion, length L. ``loss_mask[i]`` is 1.0 where the *prediction of token i* counts
    (0.0 for the prompt and for a masked sample). ``advantages``, ``rollout_logprobs`` (raw) and ``sampling_logprobs``
    have L entries, 0.0 over the prompt. ``response_mask``: True where a model sampled the token, L entries; empty if it sampled all after the
    prompt. ``reference_logprobs`` has L entries or is ``None`` where no KL is asked for.
    ``values`` are a critic's of the states before the tokens, ``returns`` what it is to learn of them, with L entries or none. ``margin``: by how
    much the chosen one of a preference pair should score more than the rejected one. ``weight_step`` is the optimizer step of the weights that
    drew it (-1: not drawn by a model); ``off_policy``: True where older weights than those of the update drew the token, L entries or none.
    ``routed_experts``: those that the forward pass sends its tokens to, of all tokens but the last (``None``: those that its own routers choose).
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    rollout_logprobs: tuple[float, ...] = ()
    sampling_logprobs: tuple[float, ...] = ()
    reference_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    weight_step: int = -1
    response_mask: tuple[bool, ...] = ()
    margin: float = 0.0
    off_policy: tuple[bool, ...] = ()
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: everything that one optimizer step is taken on. ``mask_tokens`` is the sum of all loss masks: the
    one normaliser of the step, whatever the micro-batches are. ``length_constant``: Dr.GRPO's constant (tokens)."""

    step: int
    sequences: tuple[TrainSequence, ...]
    length_constant: int = 1

    @property
    def mask_tokens(self) -> float:
        return float(sum(sum(s.loss_mask) for s in self.sequences))
