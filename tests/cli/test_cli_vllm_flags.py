"""What a user of vLLM types works, or is answered with what to type instead."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.engine_options import engine_args, template_text
from tandem.cli.flags_file import expanded
from tandem.cli.main import main, parser
from tandem.cli.vllm_flags import INSTEAD, as_flags, check_flags
from tandem.config.engine import SpeculativeConfig
from tandem.config.vllm_names import ENGINE
from tandem.types import UserError

VLLM = """
serve Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8001 -tp 2 --dtype half --max-model-len 4096 --max-num-seqs 16 --max_num_batched_tokens 8192 --seed 7
--gpu-memory-utilization 0.85 --device cuda --enable-prefix-caching --enable-chunked-prefill --served-model-name qwen small --api-key secret
--tokenizer other/tokenizer --revision v1 --generation-config vllm --enforce-eager -q int8 --disable-log-stats --disable-uvicorn-access-log
--chat-template short.jinja --download-dir cache --enable-lora --max-loras 2 --max-lora-rank 8 --lora-modules sql=adapters/sql --kv-cache-dtype auto
--allowed-origins ["*"] --allowed-methods ["POST"] --allowed-headers ["*"] --allow-credentials --no-async-scheduling
--override-generation-config={"temperature":0.5} --speculative-config {"method":"ngram","num_speculative_tokens":3}
--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --default-chat-template-kwargs {"enable_thinking":false}
"""


def parse(words: list[str]) -> Any:
    arguments = parser()
    options, extra = arguments.parse_known_args([words[0], *expanded(words[1:], arguments.commands[words[0]])])
    assert not extra
    return options


def test_the_flags_of_a_vllm_server_are_taken_as_they_are() -> None:
    options = parse(VLLM.split())
    args = engine_args(options)
    assert (options.model, options.host, options.port, options.served_model_name) == ("Qwen/Qwen3-0.6B", "0.0.0.0", 8001, ["qwen", "small"])
    assert (args.tensor_parallel_size, args.dtype, args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens) == (2, "float16", 4096, 16, 8192)
    assert (args.gpu_memory_utilization, args.quantization, args.seed, args.enforce_eager, args.revision) == (0.85, "int8", 7, True, "v1")
    assert args.speculative_config == SpeculativeConfig("ngram", num_speculative_tokens=3) and args.override_generation_config == {"temperature": 0.5}
    assert options.allowed_origins == ["*"] and options.allowed_methods == ["POST"] and options.allow_credentials
    assert options.enable_auto_tool_choice and (options.tool_call_parser, options.reasoning_parser) == ("hermes", "qwen3")
    assert options.default_chat_template_kwargs == {"enable_thinking": False}
    assert options.disable_log_stats and options.disable_uvicorn_access_log and options.api_key == ["secret"]


def test_flags_may_be_in_a_yaml_file_and_those_of_the_command_line_replace_them(tmp_path: Path) -> None:
    content = {
        "model": "a/b", "port": 8003, "max_model_len": 512, "tensor-parallel-size": 2, "enable-prefix-caching": False, "enforce-eager": True,
        "served-model-name": ["one", "two"], "speculative-config": {"method": "ngram"}, "allowed-origins": '["*"]', "disable-log-stats": False,
        "api-key": None, "chat-template": "-x.jinja",
    }  # fmt: skip
    file = tmp_path / "flags.yaml"
    file.write_text(yaml.safe_dump(content))
    options = parse(["serve", "--config", str(file)])
    args = engine_args(options)
    assert (options.model, options.port, options.served_model_name, options.chat_template) == ("a/b", 8003, ["one", "two"], "-x.jinja")
    assert (args.max_model_len, args.tensor_parallel_size, args.enable_prefix_caching, args.enforce_eager) == (512, 2, False, True)
    assert args.speculative_config == SpeculativeConfig("ngram") and not options.disable_log_stats and options.api_key == []
    options = parse(["serve", "other/model", f"--config={file}", "--port", "1", "--max-model-len=99"])
    assert (options.model, options.port, engine_args(options).max_model_len) == ("other/model", 1, 99)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist; name a YAML file of flags"),
        ("", "has no flags; write a line such as 'max-model-len: 4096'"),
        ("- a", "has no flags"),
        ("port: 1\nport: 2", "key 'port' is given twice"),
        ("port: [", "is not valid YAML"),
        ("port: true", "'port' is true, and --port needs a value"),
        ("pipeline_parallel_size: 2", "'--pipeline-parallel-size' is a flag of vLLM that Tandem does not have: use --tensor-parallel-size"),
        ("prot: 2", "unknown argument '--prot=2'"),
    ],
)
def test_a_wrong_file_of_flags_is_one_line(text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "flags.yaml").write_text(text)
    assert main(["serve", "model", "--config", str(tmp_path / "flags.yaml")]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_a_flag_of_vllm_that_is_missing_is_answered_with_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    known = parser().commands["serve"]._option_string_actions
    of_the_engine = {"--" + name.replace("_", "-"): as_flags(text) for name, text in ENGINE.items()}
    for flag, instead in {**{name: text for name, text in of_the_engine.items() if name not in known}, **INSTEAD}.items():
        assert flag not in known
        with pytest.raises(UserError, match="is a flag of vLLM that Tandem does not have: "):
            check_flags(["m", f"{flag}=1"], known)
        for word in re.split(r"[ ,;:]+", instead):
            assert not word.startswith("--") or word in known, instead
    assert main(["generate", "m", "--trust-remote-code", "--prompt", "a"]) == 2
    assert main(["generate", "m", "-pp", "2", "--prompt", "a"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tandem: 'engine.trust_remote_code' is true, which is not read: engine.model_impl is 'auto', which runs no code of a model's")
    assert lines[1] == "tandem: '-pp' is a flag of vLLM that Tandem does not have: use --tensor-parallel-size" and len(lines) == 2


def test_every_flag_of_vllm_works_or_is_answered_with_what_to_use() -> None:
    known = parser().commands["serve"]._option_string_actions
    flags = [line for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines() if not line.startswith("#")]
    answered = 0
    for flag in flags:
        if flag in known:
            continue
        with pytest.raises(UserError, match=f"'{flag}' is a flag of vLLM that Tandem does not have: ") as refusal:
            check_flags(["m", f"{flag}=1"], known)
        answered += 1
        for word in re.split(r"[ ,;:]+", str(refusal.value).partition(": ")[2].replace(" no --", " ")):
            assert not word.startswith("--") or word in known, (flag, word)
    # Both kinds are there, so that the list is one of vLLM's flags.
    assert len(flags) > 400 and answered < len(flags) - 40
    check_flags(["m", "--no-such-flag", "--prot=2", "-1"], known)


def test_numbers_of_tokens_may_have_a_unit() -> None:
    for given, tokens in (("4096", 4096), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1M", 2**20)):
        assert engine_args(parse(["serve", "m", "--max-model-len", given])).max_model_len == tokens
    for given in ("8g", "k", "1e5", "many"):
        with pytest.raises(UserError, match="is not a whole number"):
            parse(["serve", "m", "--max-num-batched-tokens", given])


def test_the_method_of_speculation_is_inferred_and_called_as_in_vllm() -> None:
    for given in ('{"model": "d", "num_speculative_tokens": 5}', '{"model": "d", "num_speculative_tokens": 5, "method": "draft_model"}'):
        assert engine_args(parse(["serve", "m", "--speculative-config", given])).speculative_config == SpeculativeConfig("draft", "d", 5)
    with pytest.raises(UserError, match=r"speculative_config\.method' is missing"):
        engine_args(parse(["serve", "m", "--speculative-config", "{}"]))


def test_a_chat_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert template_text(str(tmp_path / "t.jinja")) == "{{ messages }}" == template_text("{{ messages }}")
    with pytest.raises(UserError, match=r"--chat-template 'missing\.jinja' cannot be read"):
        template_text("missing.jinja")


@pytest.mark.parametrize("given", ["*", "[]", "[1]", '"*"', "{"])
def test_origins_that_are_no_list_are_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--allowed-origins", given]) == 2
    assert "is not a JSON list of texts, for example '[\"*\"]'" in capsys.readouterr().err
