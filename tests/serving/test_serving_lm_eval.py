"""lm-eval's client of the completions API, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import Server

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'lm_eval[api]'): the server is not tried with local-completions")

REQUESTS = [("the quick", " brown fox"), ("naïve", " café"), ("x", " 1234 and 你好")]


def test_local_completions_scores_as_transformers_does(shared: Server, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    client = LocalCompletionsAPI(
        model="tiny", base_url=f"{shared.url}/v1/completions", tokenizer=str(model), tokenizer_backend="huggingface", max_retries=1,
        tokenized_requests=True, max_length=512,
    )  # fmt: skip

    def ask(kind: str, arguments: list[Any]) -> list[Any]:
        return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]

    found = client.loglikelihood(ask("loglikelihood", REQUESTS), disable_tqdm=True)
    tokenizer, peer = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for (context, continuation), (score, is_greedy) in zip(REQUESTS, found, strict=True):
        whole = tokenizer(context + continuation, return_tensors="pt").input_ids
        start = len(tokenizer(context).input_ids)
        with torch.no_grad():
            logprobs = peer(whole).logits.double().log_softmax(-1)[0, start - 1 : -1]
        wanted = whole[0, start:]
        assert score == pytest.approx(float(logprobs.gather(1, wanted[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((logprobs.argmax(-1) == wanted).all())
    (text,) = client.generate_until(ask("generate_until", [("the quick", {"until": ["\n"], "max_gen_toks": 8, "temperature": 0})]), disable_tqdm=True)
    prompt = tokenizer("the quick", return_tensors="pt").input_ids
    with torch.no_grad():
        drawn = peer.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert text == tokenizer.decode(drawn[0, prompt.shape[1] :], skip_special_tokens=True).split("\n")[0]
