"""Our side of the rollout benchmark, with the commands and the usage of ``transformers_generate.py``, and ``rate`` of ``serve.py``. The prefix cache is on, as
in a run, but every call has prompts of its own salt, so that no call finds what another has left."""

import json
import sys

import torch
from clock import Stopwatch
from lines import answer, command
from serve import matrix_rate

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

torch.set_num_threads(int(sys.argv[4]))


def main() -> None:
    llm = LLM(sys.argv[1])
    with open(sys.argv[2], encoding="utf-8") as file:
        prompts = json.load(file)
    tokens = int(sys.argv[3])
    modes = {word: SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=word == "fixed") for word in ("fixed", "natural")}
    watch, calls = Stopwatch(), 0
    answer(ready=True)
    while (words := command())[0] != "quit":
        if words[0] == "rate":
            answer(**matrix_rate())
            continue
        calls += 1
        watch.start()
        asked = [{"prompt_token_ids": prompt, "cache_salt": str(calls)} for prompt in prompts[: int(words[1])]]
        outputs = llm.generate(asked, modes[words[0]], use_tqdm=False)
        took = watch.stop()
        answer(tokens=sum(len(output.outputs[0].token_ids) for output in outputs), **took)


main()
