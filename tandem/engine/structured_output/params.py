"""``StructuredOutputsParams``: a JSON schema, regular expression, choice or grammar that a completion must match."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tandem.config.arguments import explained
from tandem.config.vllm_names import STRUCTURED
from tandem.types import UserError

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@explained(STRUCTURED)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The format that a completion must match: exactly one of these, with vLLM's names.

    ``json``: a JSON schema, as text or as its value. ``json_object``: any JSON object. ``regex``: a regular expression in
    Rust's syntax that the whole text matches. ``choice``: one of these texts. ``grammar``: a context-free grammar in
    Lark's syntax, or in GBNF. For the two JSON kinds ``disable_any_whitespace`` forbids optional white space between
    elements, and ``whitespace_pattern`` is a regular expression of the white space that is allowed.

    The end token can be drawn only when the text is complete, and is drawn when nothing can follow, even before
    ``min_tokens``. ``max_tokens``, stop texts and stop tokens may end a completion before it is complete.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            kinds = "none" if not given else " and ".join(given)
            raise UserError(f"structured_outputs has {kinds}; give exactly one of {', '.join(_KINDS)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"structured_outputs {name} is {getattr(self, name)!r}; it must be a text")
        if self.choice is not None:
            texts = [self.choice] if isinstance(self.choice, str) else list(self.choice)
            if isinstance(self.choice, str) or not texts or not all(isinstance(text, str) and text for text in texts):
                raise UserError(f"structured_outputs choice is {self.choice!r}; it must be a list of texts, none of them empty")
            object.__setattr__(self, "choice", tuple(texts))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def key(self) -> str:
        """Returns a text that is equal for equal values only."""
        return json.dumps([getattr(self, field.name) for field in fields(self)])


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"structured_outputs json is not valid JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise UserError(f"structured_outputs json is a {type(schema).__name__}; a JSON schema is an object")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"structured_outputs json is no JSON schema: {error}") from None
