"""``LoRARequest``: the adapter of a request, with vLLM's names."""

from dataclasses import dataclass

from tandem.config.arguments import explained
from tandem.config.vllm_names import LORA
from tandem.types import UserError


@explained(LORA)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter ``lora_name``, a PEFT folder at ``lora_path``. ``lora_int_id``: vLLM's number of the adapter, from 1; each name has one
    id."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name or "\0" in self.lora_name:
            raise UserError(f"LoRARequest lora_name is {self.lora_name!r}; give the adapter a name")
        if self.lora_int_id < 1:
            raise UserError(f"LoRARequest lora_int_id is {self.lora_int_id}; it must be at least 1")
        if not self.lora_path:
            raise UserError(f"LoRARequest '{self.lora_name}' has no lora_path; give the folder of the adapter")
