"""The shapes of a mixture of experts, as plain data. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple


class ExpertNames(NamedTuple):
    """Names of a layer's router and expert matrices in the Hugging Face folder, after ``model.layers.N.``. Those of an expert contain
    ``.experts.{}.`` for its index; ``shared`` is what those of the shared experts begin with."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_experts"


CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
"""The name of a router's bias, after ``model.layers.N.``."""
SHARED_GATE = "mlp.shared_expert_gate.weight"
"""The name of the gate of a layer's shared experts, after ``model.layers.N.``."""
STANDARD_NAMES = ExpertNames()
"""The names in Qwen's and most other families."""


class SigmoidRouting(NamedTuple):
    """The routing of DeepSeek-V3 (DeepSeek-AI, 2024, section 2.1.2): an expert's score is the sigmoid of its logit, and the experts are chosen by score plus a
    bias that has no gradient, from the ``groups_per_tok`` of ``groups`` whose two best sum to the most. Gates are the scores, times ``scaling``."""

    groups: int = 1
    groups_per_tok: int = 1
    scaling: float = 1.0


class SoftmaxRouting(NamedTuple):
    """The routing of DeepSeek-V2 (DeepSeek-AI, 2024, section 2.2.2): the experts of the largest probabilities from the ``groups_per_tok`` of ``groups`` with
    the largest ones. Gates are the probabilities, times ``scaling``."""

    groups: int = 1
    groups_per_tok: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """A mixture of ``num_experts`` MLPs of ``intermediate_size``, of which each token is routed to ``num_experts_per_tok``.

    ``normalised``: the gates of a token's experts are divided by their sum. ``dense_layers``: the layers that have a plain MLP instead,
    ascending. ``names``: the family's names of the matrices. ``shared_intermediate_size``: the inner size of the shared experts together, which every token
    visits (0: none), with a gate, a sigmoid, if ``shared_gate``. ``sigmoid``, ``softmax``: how experts are chosen (both ``None``: those of the largest
    probabilities). ``biased``: the router and the experts' matrices have biases.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    normalised: bool = True
    dense_layers: tuple[int, ...] = ()
    names: ExpertNames = STANDARD_NAMES
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    sigmoid: SigmoidRouting | None = None
    biased: bool = False
    softmax: SoftmaxRouting | None = None

    @property
    def visited_size(self) -> int:
        """The inner size of all experts that a token visits, shared ones among them."""
        return self.num_experts_per_tok * self.intermediate_size + self.shared_intermediate_size

    def check(self, num_hidden_layers: int) -> None:
        """Raises ``ValueError`` for what a mixture in a model of ``num_hidden_layers`` cannot be."""
        for name in ("num_experts", "num_experts_per_tok", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model experts' {name} is {getattr(self, name)}; it must be at least 1")
        if self.shared_intermediate_size < 0:
            raise ValueError(f"model experts' shared_intermediate_size is {self.shared_intermediate_size}; it must be at least 0")
        if (routing := self.sigmoid or self.softmax) is not None:
            size = self.num_experts // max(1, routing.groups)
            # Groups are chosen by their two best sigmoid scores.
            least, words = (2, "two or more") if self.sigmoid is not None else (1, "one or more")
            if routing.groups < 1 or self.num_experts % routing.groups or size < least:
                raise ValueError(f"model experts' groups {routing.groups} do not divide its {self.num_experts} experts into {words} each")
            if not 1 <= routing.groups_per_tok <= routing.groups or routing.groups_per_tok * size < self.num_experts_per_tok:
                raise ValueError(
                    f"model experts' groups_per_tok {routing.groups_per_tok} of {routing.groups} groups of {size} have no {self.num_experts_per_tok} experts"
                )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"model num_experts_per_tok {self.num_experts_per_tok} is more than its num_experts {self.num_experts}")
        for name in (self.names.gate, self.names.up, self.names.down):
            if name.count(".experts.{}.") != 1:
                raise ValueError(f"model experts' name '{name}' must contain '.experts.{{}}.' once")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(num_hidden_layers))):
            raise ValueError(
                f"model experts' dense_layers are {list(self.dense_layers)}; "
                f"they must be layers from 0 to {num_hidden_layers - 1}, ascending"
            )
