"""vLLM's side of the engine benchmark: ``vllm_engine.py MODEL THREADS [SETTINGS as JSON]``, with the commands of ``serve.py``.

In one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that its CPU time and its steps are its own.
"""

import json
import sys
from pathlib import Path

import torch
from serve import serve

torch.set_num_threads(int(sys.argv[2]))

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402


class Steps:
    """vLLM's engine, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.spoke: set[str] = set()

    def add(self, name: str, prompt: list[int], new: int, streams: bool = False) -> None:
        kind = RequestOutputKind.DELTA if streams else RequestOutputKind.CUMULATIVE
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=kind)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> set[str]:
        outputs = self.engine.step()
        self.spoke = {output.request_id for output in outputs}
        return {output.request_id for output in outputs if output.finished}

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)


def main() -> None:
    vocabulary = json.loads((Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    settings = {
        "max_model_len": 5120, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "enforce_eager": True, "dtype": "float32",
        **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"),
    }
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, distributed_executor_backend="uni", disable_log_stats=True, **settings)
    torch.set_num_threads(int(sys.argv[2]))

    def generate(prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def samples(prompt: list[int], each: int, requests: int) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, n=each, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}] * requests, params, use_tqdm=False)

    serve(generate, vocabulary, Steps(llm), samples)


main()
