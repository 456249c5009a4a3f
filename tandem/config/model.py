"""Section ``model``: a Hugging Face folder, or the shape of a small model that the run makes itself."""

from dataclasses import dataclass

from tandem.types.errors import UserError

MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class NewModelConfig:
    """A model with random weights, made from the recipe: nothing is downloaded.

    ``architecture``: the ``model_type`` of a family in ``tandem.model.families``.
    ``tokenizer``: a folder whose tokenizer it takes; empty makes one with a token a character. ``characters``: the
    vocabulary of that besides the special tokens; ``ascii`` means the 95 printable ASCII characters and the line break.
    ``initializer_range``: standard deviation of the random weights; narrow models learn faster from about
    0.7 / sqrt(hidden_size). ``num_experts``, ``num_experts_per_tok`` and ``moe_intermediate_size`` (0: as
    ``intermediate_size``): the mixture of experts in every layer, of families that have one.
    """

    architecture: str = "qwen3"
    hidden_size: int = 128
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    max_position_embeddings: int = 256
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    tokenizer: str = ""
    characters: str = "ascii"
    initializer_range: float = 0.02
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0

    def check(self) -> None:
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
            "max_position_embeddings"
        ):
            if getattr(self, name) < 1:
                raise UserError(f"'model.create.{name}' is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"'model.create.num_attention_heads' is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"'model.create.num_experts_per_tok' is {self.num_experts_per_tok}; it must be from 1 to num_experts ({self.num_experts})"
            )
        if self.moe_intermediate_size < 0:
            raise UserError(f"'model.create.moe_intermediate_size' is {self.moe_intermediate_size}; it must be 0 or more")
        if self.num_hidden_layers > MOST_LAYERS:
            raise UserError(f"'model.create.num_hidden_layers' is {self.num_hidden_layers}; it must be at most {MOST_LAYERS}")
        if not 0 < self.initializer_range < 10:
            raise UserError(f"'model.create.initializer_range' is {self.initializer_range}; it must be above 0 and below 10")
        if self.head_dim % 2:
            raise UserError(f"'model.create.head_dim' is {self.head_dim}; rotary embedding needs an even number")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Exactly one of ``path`` (a local Hugging Face folder) and ``create``. ``max_length``: prompt and completion
    together, in tokens; 0 takes the model's own context."""

    path: str | None = None
    create: NewModelConfig | None = None
    max_length: int = 0

    def check(self) -> None:
        if (self.path is None) == (self.create is None):
            given = "both are given" if self.path is not None else "neither is given"
            raise UserError(f"section 'model' needs either 'path' or 'create'; {given}")
        if self.max_length < 0:
            raise UserError(f"'model.max_length' is {self.max_length}; it must be 0 (the model's own context) or more")
