"""Writes preference pairs for the task `sort` as JSON lines, from a model's own answers: to `3142=` the right answer is preferred to a wrong one that
the model gave.

    python examples/preferences.py runs/sft_sort/model runs/preferences/pairs.jsonl
"""

import json
import random
import sys
from pathlib import Path

from tandem import LLM, SamplingParams

PROMPTS, SAMPLES = 4096, 4


def main(model: str, path: Path) -> None:
    draw = random.Random(0)
    questions = [[draw.randrange(10) for _ in range(draw.randint(3, 6))] for _ in range(PROMPTS)]
    prompts = ["".join(map(str, digits)) + "=" for digits in questions]
    with LLM(model) as llm:
        outputs = llm.generate(prompts, SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=16, seed=0))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for digits, prompt, output in zip(questions, prompts, outputs, strict=True):
            right = "".join(map(str, sorted(digits)))
            wrong = sorted({sample.text for sample in output.outputs if sample.finish_reason == "stop"} - {right, ""})
            if wrong:
                file.write(json.dumps({"prompt": prompt, "chosen": right, "rejected": draw.choice(wrong)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
