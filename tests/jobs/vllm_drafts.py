"""Runs in vLLM's environment: greedy answers with an EAGLE-3 head, and how many of its draft tokens were accepted, as one line of JSON.

    python vllm_drafts.py MODEL HEAD PROMPTS
"""

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model, head, prompts = sys.argv[1:]
    speculative: dict[str, Any] = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8, disable_log_stats=False, speculative_config=speculative)
    answers = llm.generate(json.loads(prompts), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    proposed, accepted = (int(counts[f"vllm:spec_decode_num_{name}_tokens"]) for name in ("draft", "accepted"))
    print(json.dumps({"tokens": tokens, "proposed": proposed, "accepted": accepted}), flush=True)


if __name__ == "__main__":
    main()
