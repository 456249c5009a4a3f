"""Tokenizers with the special tokens of a chat template, made for tests: byte-level BPE with merges of the template's own text, line breaks among them."""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How the tokenizers of Llama 3 and Qwen divide a text: a mark and the line breaks after it are one piece."""
HERE = Path(__file__).parent / "chat_templates"
SPECIAL = re.compile(
    r"<[|｜][^|｜<>]+[|｜]>|<\|[A-Za-z_0-9]+>|<[A-Za-z_0-9]+\|>|</?(?:s|bos|eos|sop|think|tool_call|tool_response|start_of_turn|end_of_turn)>|<BOS_TOKEN>|\[/?[A-Z_]+\]|\[gMASK\]"
)


def make_tokenizer(folder: Path, template: str, ends: list[str]) -> tuple[Tokenizer, ChatTemplate]:
    """Writes a tokenizer folder with ``template``, of which the tokens ``ends`` end a completion."""
    folder.mkdir(parents=True, exist_ok=True)
    # Built from pieces in a template: <|observation|> from "<|" + role.
    special = sorted({*SPECIAL.findall(template), *ends, "<|user|>", "<|assistant|>", "<|system|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"})
    backend = tokenizers.Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    backend.decoder = decoders.ByteLevel()
    text = [template, *("\n\n", "\n", ">\n\n", "}\n") * 20]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, min_frequency=1, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0], "bos_token": special[0]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [backend.token_to_id(token) for token in ends]}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
