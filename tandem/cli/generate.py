"""Complete prompts with a model.

MODEL is a Hugging Face folder (a run's is runs/NAME/model). A prompt is continued as it stands; --chat puts it through the
tokenizer's chat template first.

examples:
  tandem generate runs/sort/model --prompt "sort 3 1 2 =" --temperature 0
  tandem generate runs/sort/model --prompt "sort 9 4 4 1 =" --n 4
  cat prompts.txt | tandem generate runs/sort/model          one prompt a line
  tandem generate runs/sort/model --prompt "..." --json      token ids and log-probabilities too
"""

import argparse
import contextlib
import dataclasses
import json
import sys

from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--prompt", action="append", help="may be given several times; without it, lines of standard input")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--stop", action="append", default=[], help="a text that ends a completion; may be given several times")
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", metavar="FOLDER", help="a LoRA adapter as PEFT saves it")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="processes that hold a part of the model each")
    parser.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a completion")


def run(options: argparse.Namespace) -> int:
    prompts = options.prompt
    if prompts is None:
        if sys.stdin.isatty():
            raise UserError("no prompt; give --prompt TEXT or pipe lines into standard input")
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not prompts:
            raise UserError("standard input held no prompt; give --prompt TEXT or pipe lines into it")
    from tandem.engine.llm import LLM
    from tandem.engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=options.n, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p,
        max_tokens=options.max_tokens, stop=options.stop, seed=options.seed,
    )
    adapter, rank = None, 1
    if options.lora is not None:
        from tandem.engine.lora_request import LoRARequest
        from tandem.model.lora import rank_of

        adapter, rank = LoRARequest(options.lora, 1, options.lora), rank_of(options.lora)
    llm = LLM(
        options.model, seed=options.seed, tensor_parallel_size=options.tensor_parallel, enable_lora=adapter is not None,
        max_lora_rank=rank,
    )
    texts = prompts
    if options.chat:
        from tandem.text.chat import apply_chat_template

        texts = [apply_chat_template(options.model, [{"role": "user", "content": prompt}]) for prompt in prompts]
    with contextlib.closing(llm):
        outputs = llm.generate(texts, params, use_tqdm=False, lora_request=adapter)
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if options.json:
                print(json.dumps({"prompt": prompt, **dataclasses.asdict(completion)}, ensure_ascii=False))
            else:
                print(completion.text if len(prompts) == options.n == 1 else f"{prompt}{completion.text}")
    return 0
