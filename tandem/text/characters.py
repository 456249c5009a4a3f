"""A tokenizer with one token a character, for models that a run makes itself."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.types import UserError

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ROLES = ("system", "user", "assistant", "tool")
END_OF_TURN = "<end>"
_CHAT_TEMPLATE = """\
{%- if tools %}<system>
{%- for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(", ") }}){% endfor %}<end>{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.role == "assistant" %}{% generation %}{{ message.content or "" }}
{%- if message.tool_calls %}[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<end>{% endgeneration %}
{%- else %}{{ message.content }}<end>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
"""A token for each role and one for the end of a turn; calls in Python's syntax, which is short."""
ASCII = "".join(sorted(set(string.printable) - set("\t\r\x0b\x0c")))
"""The 95 printable ASCII characters and the line break."""


def make_character_tokenizer(characters: str, folder: str | Path, *, chat: bool = False) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``, as transformers reads them.

    Ids: 0 ``<pad>``, 1 ``<bos>``, 2 ``<eos>``, then ``characters`` in their order; ``ascii`` means ``ASCII``. With ``chat`` they are followed by
    ``ROLES`` and ``END_OF_TURN``, which ends a sequence, and ``chat_template.jinja`` is written.
    There is no token for unknown characters: encoding one is an error. Raises ``UserError`` for a character given
    twice, or none.
    """
    if characters == "ascii":
        characters = ASCII
    twice = next((c for i, c in enumerate(characters) if c in characters[:i]), None)
    if twice is not None:
        raise UserError(f"the tokenizer's characters contain {twice!r} twice; list each once")
    if not characters:
        raise UserError("the tokenizer's characters are empty; give at least one, or 'ascii'")
    added = (*(f"<{role}>" for role in ROLES), END_OF_TURN) if chat else ()
    vocabulary = {token: number for number, token in enumerate((PAD, BOS, EOS, *characters, *added))}
    # The model names an unknown token that the vocabulary lacks, so an unknown character raises and is never dropped.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS, *added)])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Not Tokenizer.save, which raises the bare class Exception on a full disk.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": END_OF_TURN if chat else EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if chat:
        (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
