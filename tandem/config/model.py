"""Section ``model``: a Hugging Face folder or a model of the Hub, or the shape of a small model that the run creates."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.implementation import Implementation, ImplementationName
from tandem.config.limits import check_at_least_one, check_float32
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class NewModelConfig:
    """A model with random weights and a tokenizer with one token per character. Nothing is downloaded. It is untrained, so a recipe with
    rollouts needs a section `sft`."""

    architecture: str = "qwen3"
    """The `model_type` of a family in `tandem.model.families`, of those in [models](models.md)."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_hidden_layers: int = 5
    """Number of layers, at most 1000."""
    num_attention_heads: int = 4
    """Number of query heads; a multiple of `num_key_value_heads`."""
    num_key_value_heads: int = 2
    """Number of key and value heads; in a family with latent attention each query head has its own, whatever is set here."""
    head_dim: int = 32
    """Width of a head; must be even. In a family with latent attention, of the part that is not rotated."""
    intermediate_size: int = 512
    """Width of the feed-forward layer."""
    max_position_embeddings: int = 256
    """Context length in tokens (here: characters)."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    tokenizer: str = ""
    """Folder of the tokenizer to use, or a model of the Hub that has it. Empty: one with a token per character."""
    chat: bool = False
    """Give the tokenizer a chat template, with tokens for the roles of a conversation, so that prompts may be messages and show tools."""
    characters: str = "ascii"
    """Vocabulary besides the special tokens. `ascii`: the 95 printable ASCII characters and the line break."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights; narrow models learn faster from about 0.7 / sqrt(`hidden_size`)."""
    num_experts: int = 8
    """Number of experts of a layer (`qwen3_moe` and `mixtral` only, as the next two)."""
    num_experts_per_tok: int = 2
    """Number of experts per token."""
    moe_intermediate_size: int = 0
    """Width of an expert. 0: `intermediate_size`."""

    def check(self) -> None:
        check_at_least_one(
            "model.create", self, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "max_position_embeddings",
        )  # fmt: skip
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"'model.create.num_attention_heads' is {self.num_attention_heads}; it must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
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
        check_float32("model.create", self, "rope_theta")
        if not self.rope_theta > 0:
            raise UserError(f"'model.create.rope_theta' is {self.rope_theta:g}; it must be above 0")
        if self.head_dim % 2:
            raise UserError(f"'model.create.head_dim' is {self.head_dim}; rotary embedding needs an even number")
        if self.tokenizer:
            reason = f"the vocabulary is that of model.create.tokenizer, '{self.tokenizer}'"
            refuse_unread("model.create", self, reason, "characters", "chat", fix="leave model.create.tokenizer empty")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Hugging Face folder or a model of the Hub, or the shape of a small model that the run creates. Exactly one of `path` and `create`."""

    path: str | None = None
    """A Hugging Face folder of a family in `tandem.model.families`, with weights in safetensors, or the name of such a model on the Hugging Face Hub:
    `OWNER/NAME` or `hf://OWNER/NAME@REVISION`. A run records the commit that it downloaded."""
    create: NewModelConfig | None = None
    """The model to create; a section of its own, below."""
    max_length: int = 0
    """Maximum tokens of prompt and completion together. 0: the model's context."""
    implementation: ImplementationName = "auto"
    """Who computes the model. `auto` and `tandem`: Tandem's own network, for the families in [models](models.md). `transformers`: the module of transformers,
    for any other decoder that it has, with Tandem's attention, KV cache and products; slower, in one process for each copy of the model."""
    trust_remote_code: bool = False
    """With `implementation: transformers`: run the code in the model's folder if its class is not in transformers. It can do anything on this machine."""
    export_dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    """Dtype of the trained model that the run writes at its end. `auto`: that of the model in `path`; of a created model, `trainer.dtype`."""

    @property
    def implemented_by(self) -> Implementation:
        """Who computes the model."""
        return Implementation(self.implementation, self.trust_remote_code)

    def check(self) -> None:
        if (self.path is None) == (self.create is None):
            given = "both are given" if self.path is not None else "neither is given"
            raise UserError(f"section 'model' needs either 'path' or 'create'; {given}")
        if self.create is not None and self.implementation == "transformers":
            raise UserError("'model.implementation' is 'transformers' with model.create, whose families are Tandem's own; leave it out, or give model.path")
        if self.implementation != "transformers":
            reason = f"model.implementation is '{self.implementation}', which runs no code of a model's folder"
            refuse_unread("model", self, reason, "trust_remote_code", fix="set model.implementation to transformers")
        if self.max_length < 0:
            raise UserError(f"'model.max_length' is {self.max_length}; it must be 0 (the model's own context) or more")
