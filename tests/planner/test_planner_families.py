"""A folder of every listed family is planned for training and for serving, in formats that it can have."""

import json
import re
from pathlib import Path

import pytest
from listed_families import TINY, peer_config

from tandem.cli.main import main
from tandem.planner.model_sizes import read_model_sizes

SERVING = ("--gpu", "H100-80GB", "--requests-per-s", "10", "--prompt-tokens", "10", "--output-tokens", "10")
QUICK = ("deepseek_v3", "gpt_oss", "olmo3")


def parameters_in_transformers(config: object) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in sorted(TINY)])
def test_a_folder_of_the_family_is_planned_for_training_and_serving(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = peer_config(family, **TINY[family])
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == parameters_in_transformers(config) and answer["step_seconds"] > 0 and answer["fits"]
    assert main(["plan", "serving", str(tmp_path), *SERVING]) == 0
    (method,) = set(re.findall(r"tandem quantize .* --method (\w+)", capsys.readouterr().out))
    # AWQ folds its scales into the norms before a block.
    assert method == ("gptq" if family in ("olmo2", "olmo3") else "awq")
    if family in ("olmo2", "olmo3"):
        assert main(["plan", "serving", str(tmp_path), *SERVING, "--quantization", "awq"]) != 0
        assert "no norms before attention and MLP" in capsys.readouterr().err
    if read_model_sizes(tmp_path).latent is not None:
        assert main(["plan", "serving", str(tmp_path), *SERVING, "--kv-cache-dtype", "int4"]) != 0
        assert "latent attention cannot have" in capsys.readouterr().err
