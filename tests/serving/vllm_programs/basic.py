"""Offline generation as a user of vLLM writes it: a list of prompts, one set of parameters."""

import sys

from tandem import LLM, SamplingParams

prompts = ["the quick brown", "over the lazy", "1234 and", "naïve"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=0)


def main() -> None:
    llm = LLM(
        model=sys.argv[1], tensor_parallel_size=1, dtype="auto", gpu_memory_utilization=0.9, max_model_len=256, max_num_seqs=8, enforce_eager=True,
        enable_prefix_caching=True, trust_remote_code=False, seed=None, disable_log_stats=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    )  # fmt: skip
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"{output.prompt!r} {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
