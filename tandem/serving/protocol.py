"""The bodies of requests. Fields that are not listed are accepted and ignored; those that are listed as not supported are
refused where they ask for something."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tandem.serving.errors import invalid

MAX_COMPLETIONS = 1024
MAX_TOOLS = 1024
MAX_SHORT_TEXT = 512
"""Characters of a stop string, a forbidden word and a cache salt, which stay in memory while a request waits."""
_INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
LogprobCount = Annotated[int, Field(ge=-1, lt=2**31)]
"""-1: of all tokens of the vocabulary."""
# Otherwise a list of a million wrong entries has a million errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
ShortText = Annotated[str, Field(max_length=MAX_SHORT_TEXT)]


def _numbers(given: Any) -> Any:
    wrong = next((name for name, value in given.items() if type(value) not in (int, float)), None) if isinstance(given, dict) else None
    if wrong is not None:
        raise ValueError(f"the bias of {str(wrong)[:40]!r} is not a number")
    return given


class Body(BaseModel):
    """A JSON object, whose values have the types they should have: a number in quotes is not a number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    not_supported: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raise ``ApiError`` for a field that asks for what this server does not do."""
        for name in self.not_supported:
            value = (self.model_extra or {}).get(name)
            if value not in (None, False, [], {}):
                raise invalid(f"'{name}' is not supported; leave it out", name)


class SamplingFields(Body):
    """vLLM's sampling parameters; ``null`` is the default."""

    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    best_of: Positive | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True, max_length=128)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    prompt_logprobs: LogprobCount | None = None
    bad_words: Annotated[list[ShortText], Field(fail_fast=True, max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: ShortText | None = None
    num_draft_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None


class CompletionRequest(OpenAIFields):
    not_supported = (
        "suffix", "use_beam_search", "prompt_embeds", "logits_processors"
    )  # fmt: skip

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Count | None = 16
    logprobs: LogprobCount | None = None
    echo: bool | None = None


class ChatMessage(Body):
    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class JsonSchema(Body):
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(Body):
    """``parameters``: the JSON schema of its arguments."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatCompletionRequest(OpenAIFields):
    not_supported: ClassVar[tuple[str, ...]] = (
        "functions", "function_call", "audio", "prediction", "web_search_options", "use_beam_search", "prompt_embeds",
        "logits_processors"
    )  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None


class GenerateSampling(SamplingFields):
    max_tokens: Count | None = None
    logprobs: LogprobCount | None = None


class GenerateRequest(Body):
    """``key`` and ``first_index`` as in ``Engine.add_request``: with the seed they fix every random number. ``model``: the
    model's name, or an adapter's."""

    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: TokenIds | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: ShortText | None = None
    num_draft_tokens: Count | None = None
    key: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    first_index: Count | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class AbortRequest(Body):
    request_ids: Texts | None = None


class LoadAdapter(Body):
    """``load_inplace``: replaces the adapter of the same name, if there is one."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class StartUpdate(Body):
    version: Annotated[list[Annotated[int, Field(ge=-(2**31), lt=2**31)]], Field(min_length=2, max_length=2)] | None = None


class InitTransfer(Body):
    init_info: dict[str, Any] | None = None


class UpdateInfo(Body):
    folder: Annotated[str, Field(min_length=1)]


class UpdateWeights(Body):
    update_info: UpdateInfo
