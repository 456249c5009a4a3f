"""A small tokenizer with a chat template, and the examples that are in a folder of shards."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tandem.data.shards import ShardReader
from tandem.data.tokenizing.tokenize import read_dataset
from tandem.storage.files import open_storage

TURN = "{{ '<|im_start|>' + m.role + '\\n' }}"
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}" + TURN + "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}" + TURN + "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "{{ '' }}")
QUESTIONS = ["数 is what?", "naïve café", "2 + 2 =", "Tell me\nmore <b> & 'so'", "😀", "and then?"]


def save_tokenizer(folder: Path, template: str) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    backend.train_from_iterator(QUESTIONS * 3 + ["assistant user system It is"] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def examples_in(folder: Path) -> list[tuple[list[int], list[int]]]:
    dataset, found = read_dataset(open_storage(str(folder))), []
    for shard in dataset.shards:
        reader = ShardReader(folder / f"{shard.name}.tar", folder / f"{shard.name}.lengths", shard, dataset.dtype)
        found += [(list(reader.tokens(i, 0, n)), list(reader.learned(i, 0, n))) for i, n in enumerate(reader.lengths)]
    return found
