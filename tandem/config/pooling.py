"""How a model that embeds or scores texts makes one result of the hidden states of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tandem.types.errors import UserError

PoolingType = Literal["LAST", "MEAN"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]

OVERRIDES = ("architectures", "classifier_from_token", "is_matryoshka", "is_original_qwen3_reranker", "matryoshka_dimensions")
"""The keys of ``config.json`` that ``hf_overrides`` may replace."""


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """How an engine with `runner: pooling` makes one result of a text, where the model's folder does not say it or says it otherwise."""

    pooling_type: PoolingType | None = None
    """`LAST`: the hidden state of the last token; `MEAN`: the mean over all tokens. Empty: as the folder says, else `LAST`."""
    use_activation: bool | None = None
    """Normalize embeddings to length 1, and map scores to 0 to 1 by a sigmoid. Empty: as the folder says, else on."""
    dimensions: int | None = None
    """Keep only the first components of embeddings. Empty: all. For models that were trained for it (Matryoshka)."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "seq_pooling_type": "it is called pooling_type",
        "tok_pooling_type": "the results of all tokens are asked for with the tasks token_embed and token_classify",
        "normalize": "it is called use_activation",
        "softmax": "it is called use_activation",
        "activation": "it is called use_activation",
        "task": "a request names its task",
        "enable_chunked_processing": "a text has at most max_model_len tokens",
        "max_embed_len": "a text has at most max_model_len tokens",
        "logit_mean": "scores are calibrated by who reads them",
        "logit_sigma": "scores are calibrated by who reads them",
        "step_tag_id": "ask for token_classify and choose among its results",
        "returned_token_ids": "set classifier_from_token with hf_overrides",
    }

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if self.dimensions is not None and self.dimensions < 1:
            raise UserError(f"pooler_config dimensions is {self.dimensions}; it must be at least 1")


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for ``hf_overrides`` with a key that is not read, or a value that it cannot have."""
    for name in overrides:
        if name not in OVERRIDES:
            raise UserError(f"engine hf_overrides has {str(name)!r}; only {', '.join(OVERRIDES)} are read from it: edit the config.json of the model's folder")
    tokens = overrides.get("classifier_from_token")
    if tokens is not None and (not isinstance(tokens, list | tuple) or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens)):
        raise UserError(f'engine hf_overrides classifier_from_token is {tokens!r}; it must be the tokens of no and yes, such as ["no", "yes"]')
