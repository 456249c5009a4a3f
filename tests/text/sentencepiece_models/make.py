"""Writes the models and ``ids.json`` beside this file, with sentencepiece: models with the settings of Llama 2 and Mistral (BPE, bytes for unknown characters,
a space before the text) and of Gemma (the same without that space), and the ids that sentencepiece gives the texts."""

import io
import json
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
TEXTS = [
    "the quick brown fox jumps over the lazy dog", "naïve café 😀 1234", "  two spaces\n\tand a tab ", "Grüße aus München", "数学 の 問題", " ", "</s> <s>"
]  # fmt: skip
SETTINGS = {
    "llama": {"add_dummy_prefix": True, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
    "gemma": {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
}


def write_models() -> None:
    ids = {}
    for name, settings in SETTINGS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS[:5] * 20), model_writer=model, vocab_size=360, model_type="bpe", byte_fallback=True, character_coverage=0.98,
            normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, **settings,
        )  # fmt: skip
        (HERE / f"{name}.model").write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ids[name] = [processor.encode(text) for text in TEXTS]
    (HERE / "ids.json").write_text(json.dumps({"sentencepiece": sentencepiece.__version__, "texts": TEXTS, **ids}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_models()
