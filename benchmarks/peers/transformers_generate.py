"""The peer of the rollout benchmark: ``generate`` of transformers. ``transformers_generate.py MODEL PROMPTS.json TOKENS THREADS``;
``fixed N`` samples TOKENS tokens for each of the first N prompts at temperature 1, ``natural N`` up to TOKENS, until each ends."""

import json
import sys

import torch
from clock import Stopwatch
from lines import answer, command
from transformers import AutoModelForCausalLM, GenerationConfig

torch.set_num_threads(int(sys.argv[4]))


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    with open(sys.argv[2], encoding="utf-8") as file:
        prompts = json.load(file)
    tokens = int(sys.argv[3])
    end = model.generation_config.eos_token_id
    # Without an end token nothing is checked for one: the least work that makes exactly TOKENS tokens.
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, "max_new_tokens": tokens}
    modes = {"fixed": GenerationConfig(**settings), "natural": GenerationConfig(**settings, eos_token_id=end)}
    torch.manual_seed(0)
    watch = Stopwatch()
    answer(ready=True)
    while (words := command())[0] != "quit":
        chosen = prompts[: int(words[1])]
        watch.start()
        width = max(map(len, chosen))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in chosen])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in chosen])
        with torch.inference_mode():
            model.generation_config = modes[words[0]]
            made = model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()
        took = watch.stop()
        answer(tokens=sum(row.index(end) + 1 if words[0] == "natural" and end in row else len(row) for row in made), **took)


main()
