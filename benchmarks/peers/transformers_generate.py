"""The peer of the rollout benchmark: ``generate`` of transformers. ``transformers_generate.py MODEL PROMPTS.json TOKENS THREADS``;
``generate N`` samples TOKENS tokens for each of the first N prompts at temperature 1."""

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
    # Without an end token nothing is checked for one: the least work that makes exactly TOKENS tokens.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, max_new_tokens=tokens)
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
            made = model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()
        took = watch.stop()
        answer(tokens=sum(map(len, made)), **took)


main()
