"""What the routes of one server share."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from tandem.engine.lora.request import LoRARequest
from tandem.engine.pooling.pairs import pair_template
from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.serving.bodies import UnfinishedBodies
from tandem.serving.engines.pool import Pool
from tandem.serving.errors import ApiError, invalid
from tandem.serving.json_body import BodyParser
from tandem.serving.kv_transfer.transfers import KVTransfers
from tandem.serving.limits import Limits, make_limits
from tandem.serving.log_lines import LogLines
from tandem.serving.memory import MemoryReturn
from tandem.serving.metrics import Metrics
from tandem.serving.prompts import PromptReader
from tandem.serving.response_store import ResponseStore
from tandem.serving.routes.adapters import ServedAdapters
from tandem.serving.settings import ServerSettings
from tandem.serving.text_encoder import TextEncoder
from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError, WeightVersion


@dataclass
class ServerState:
    """``is_started``: every engine has loaded its model once. ``is_draining``: nothing new is taken."""

    settings: ServerSettings
    pool: Pool
    metrics: Metrics
    tokenizer: Tokenizer
    adapters: ServedAdapters
    encoder: TextEncoder
    bodies: UnfinishedBodies
    kv_transfers: KVTransfers
    sampling_defaults: dict[str, float | int]
    """What the model's ``generation_config.json`` gives a request that does not."""
    pooling: ModelPooling | None = None
    """How the model embeds or scores texts; ``None``: it generates text."""
    lines: LogLines = field(default_factory=LogLines)
    parser: BodyParser = field(default_factory=BodyParser)
    memory: MemoryReturn = field(default_factory=MemoryReturn)
    responses: ResponseStore = field(default_factory=ResponseStore)
    is_started: bool = False
    is_draining: bool = False
    open_requests: int = 0
    """Requests of clients whose answers are not sent to their end."""
    update: tuple[WeightVersion, list[str]] | None = None
    """The weight update in progress: its version, and the folders that were read for it."""
    created: int = field(default_factory=lambda: int(time.time()))
    _limits: list[Limits] = field(default_factory=list)
    _templates: dict[bool, ChatTemplate] = field(default_factory=dict)
    _pair_templates: list[ChatTemplate | None] = field(default_factory=list)
    _special: frozenset[str] | None = None

    @property
    def model_name(self) -> str:
        return self.settings.names[0]

    @property
    def max_model_len(self) -> int:
        assert self.pool.info is not None, "the model is loaded before requests are admitted"
        return self.pool.info.max_model_len

    @property
    def limits(self) -> Limits:
        """The limits of one request; known once the model is loaded."""
        if not self._limits:
            info, settings = self.pool.info, self.settings
            assert info is not None, "the model is loaded before requests are admitted"
            found = make_limits(self.tokenizer, info.max_model_len, info.vocab_size, settings.max_requests, settings.max_body_bytes, settings.max_logprobs)
            self.bodies.limit_bytes, self.bodies.client_limit_bytes = found.max_unfinished_bytes, found.max_unfinished_bytes_per_client
            self._limits.append(found)
        return self._limits[0]

    def prompt_reader(self, request: Request, truncate_prompt_tokens: int | None = None, max_tokens: int | None = None) -> PromptReader:
        """Returns the reader of the prompts of ``request``."""
        return PromptReader(self.encoder, self.limits, request, truncate_prompt_tokens, max_tokens)

    @property
    def why_not_ready(self) -> str | None:
        """A few words for a balancer's log, ``None`` while requests are welcome."""
        if not self.is_started:
            return "loading"
        if self.is_draining:
            return "draining"
        if self.pool.is_sleeping:
            return "asleep"
        if self.pool.has_engine:
            return None
        return "no engine" if self.pool.why_hung is None else "no engine answers"

    def check_model(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name, ``None`` for the model itself. Raises ``ApiError`` for a model that is not served here."""
        adapter = self.adapters.get(name)
        if name is not None and adapter is None and name not in self.settings.names:
            known = ", ".join((*self.settings.names, *self.adapters.names))
            raise ApiError(404, f"the model '{name[:100]}' is not served here; there is {known}", param="model", code="model_not_found")
        return adapter

    def are_special(self, marks: Sequence[str]) -> bool:
        """Returns whether one of ``marks`` is a special token, which the text of an answer has only if it is asked for."""
        if self._special is None:
            self._special = frozenset(token.content for token in self.tokenizer.backend.get_added_tokens_decoder().values() if token.special)
        return not self._special.isdisjoint(marks)

    def chat_template(self, with_tools: bool = False) -> ChatTemplate:
        """Raises ``ApiError`` where the model's tokenizer has none. ``with_tools``: the one for requests with tools, where there are several."""
        if with_tools not in self._templates:
            try:
                found = ChatTemplate.from_folder(self.settings.tokenizer_folder, with_tools=with_tools, source=self.settings.chat_template)
            except UserError as error:
                raise invalid(str(error), "messages") from None
            self._templates[with_tools] = found
        return self._templates[with_tools]

    def pair_template(self) -> ChatTemplate | None:
        """Returns the template of the pairs of texts that the model scores, ``None`` where it has none. Raises ``UserError`` for one that is broken."""
        assert self.pooling is not None, "asked for a model that scores pairs"
        if not self._pair_templates:
            self._pair_templates.append(pair_template(self.pooling, self.settings.tokenizer_folder, self.settings.chat_template))
        return self._pair_templates[0]
