"""The bodies of requests for embeddings and scores, with vLLM's names. A field that asks for what there is none of is refused by name."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tandem.serving.protocol import Body, ChatMessage, Count, Positive, ShortText, Texts, TokenIds

Input = str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
TextOrTexts = str | Texts


class PoolingFields(Body):
    """What all of them have. ``truncation_side``: which end is cut off by ``truncate_prompt_tokens``; ``right``, as in vLLM, keeps the first tokens."""

    not_supported: ClassVar[tuple[str, ...]] = ("mm_processor_kwargs", "normalize", "softmax", "activation")

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: ShortText | None = None
    use_activation: bool | None = None


class TextFields(PoolingFields):
    """A text, several, their token ids, or a conversation."""

    input: Input | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EncodedFields(TextFields):
    """``base64``: the numbers as fp32, little-endian, as OpenAI's client reads them."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: Positive | None = None


class EmbeddingRequest(EncodedFields):
    pass


class PoolingRequest(EncodedFields):
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyRequest(TextFields):
    pass


class PairFields(PoolingFields):
    """``max_tokens_per_query``, ``max_tokens_per_doc``: the first tokens that are kept of each text of a pair; 0: all."""

    max_tokens_per_query: Count | None = None
    max_tokens_per_doc: Count | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(PairFields):
    """Two lists of texts, by one of four pairs of names."""

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None
    items: TextOrTexts | None = None
    data_1: TextOrTexts | None = None
    data_2: TextOrTexts | None = None


class RerankRequest(PairFields):
    """As of Jina and Cohere. ``top_n``: 0 returns all."""

    not_supported: ClassVar[tuple[str, ...]] = (*PoolingFields.not_supported, "rank_fields", "max_chunks_per_doc")

    query: str
    documents: TextOrTexts
    top_n: Count | None = None
    return_documents: bool | None = None
