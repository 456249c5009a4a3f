"""Our side of the engine benchmark: ``tandem_engine.py MODEL THREADS [SETTINGS as JSON]``, with the commands of ``serve.py``.

The prefix cache is on, as in a run; every call has other prompts, so that no call finds what another has left.
"""

import json
import sys
from pathlib import Path

import torch
from serve import serve

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams

torch.set_num_threads(int(sys.argv[2]))


class Steps:
    """The engine below ``LLM``, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.spoke: set[str] = set()

    def add(self, name: str, prompt: list[int], new: int, streams: bool = False) -> None:
        kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
        self.engine.add_request(name, prompt, SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, output_kind=kind))

    def step(self) -> set[str]:
        outputs = self.engine.step()
        self.spoke = {output.request_id for output in outputs}
        return {output.request_id for output in outputs if output.finished}

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)


def main() -> None:
    vocabulary = json.loads((Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    settings = {"max_model_len": 5120, "max_num_seqs": 64, **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")}
    llm = LLM(sys.argv[1], **settings)

    def generate(prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def samples(prompt: list[int], each: int, requests: int) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, n=each)
        llm.generate([{"prompt_token_ids": prompt}] * requests, params, use_tqdm=False)

    serve(generate, vocabulary, Steps(llm), samples)


main()
