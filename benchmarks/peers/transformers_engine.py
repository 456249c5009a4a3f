"""transformers' side of the engine benchmark: ``transformers_engine.py MODEL THREADS``, with the commands of ``serve.py`` and
``gap A B TOKEN ...``: logit of token A less that of token B after the given tokens, which says how near a tie was."""

import sys
from collections.abc import Sequence

import torch
from serve import serve
from transformers import AutoModelForCausalLM, GenerationConfig

torch.set_num_threads(int(sys.argv[2]))


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        # All prompts have one length, so nothing is padded; without an end token nothing is checked for one.
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        model.generation_config = GenerationConfig(max_new_tokens=new, pad_token_id=0, **drawing)
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[:, ids.shape[1] :].tolist()

    def gap(words: Sequence[str]) -> dict[str, float]:
        first, second, *tokens = map(int, words)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].double()
        return {"gap": float(logits[first] - logits[second]), "spread": float(logits.std())}

    torch.manual_seed(0)
    serve(generate, model.config.vocab_size, others={"gap": gap})


main()
