"""``LLM`` with vLLM's interface: chat, the tokenizer, closing, and a model in object storage."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import EngineArgs
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.weight_store import WeightStore
from tandem.types import RunError, UserError

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}{{ tail }}"
MESSAGES = [{"role": "system", "content": "sort"}, {"role": "user", "content": "4 1 9"}]
PARAMS = SamplingParams(seed=1, max_tokens=20)


@pytest.fixture
def chat_llm(make_folder: Callable[..., Path], tmp_path: Path) -> LLM:
    folder = tmp_path / "chat"
    shutil.copytree(make_folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(folder, max_num_seqs=8)


def test_a_conversation_is_its_templates_text(chat_llm: LLM) -> None:
    pytest.importorskip("jinja2")
    (answer,) = chat_llm.chat(MESSAGES, PARAMS)
    assert answer.prompt == "system sort user 4 1 9 assistant "
    (plain,) = chat_llm.generate(answer.prompt, PARAMS)
    assert (answer.prompt_token_ids, answer.outputs) == (plain.prompt_token_ids, plain.outputs)
    several = chat_llm.chat([MESSAGES, MESSAGES[1:]], [PARAMS, PARAMS], chat_template_kwargs={"tail": "now"})
    assert [a.prompt for a in several] == ["system sort user 4 1 9 assistant now", "user 4 1 9 assistant now"]


def test_a_last_message_is_continued_and_a_template_can_be_given(chat_llm: LLM) -> None:
    pytest.importorskip("jinja2")
    begun = [*MESSAGES, {"role": "assistant", "content": "1 4"}]
    (answer,) = chat_llm.chat(begun, PARAMS, add_generation_prompt=False, continue_final_message=True)
    assert answer.prompt == "system sort user 4 1 9 assistant 1 4"
    with pytest.raises(UserError, match="exclude each other"):
        chat_llm.chat(begun, PARAMS, continue_final_message=True)
    (other,) = chat_llm.chat(MESSAGES, PARAMS, chat_template="{{ messages[1].content }}")
    assert other.prompt == "4 1 9"


def test_chat_without_a_template_or_a_tokenizer_is_refused(make_llm: Callable[..., LLM]) -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(UserError, match="no chat template"):
        make_llm().chat(MESSAGES)
    with pytest.raises(UserError, match="no tokenizer"):
        make_llm(skip_tokenizer_init=True).chat(MESSAGES)


def test_the_tokenizer_is_the_engines_own(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(llm.generate("abc", PARAMS)[0].prompt_token_ids) == "abc"
    with pytest.raises(UserError, match="no tokenizer"):
        make_llm(skip_tokenizer_init=True).get_tokenizer()


def test_a_closed_llm_gives_its_memory_back_and_says_that_it_is_closed(make_llm: Callable[..., LLM]) -> None:
    with make_llm() as llm:
        llm.generate("abc", PARAMS)
        weights, cache = weakref.ref(llm.engine.decoder), weakref.ref(llm.engine._runner)
    gc.collect()
    assert weights() is None and cache() is None
    with pytest.raises(RunError, match="this LLM is closed"):
        llm.generate("abc")
    llm.close()


def test_a_model_in_object_storage_is_held_while_it_is_open(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_folder()
    url, settings = f"file://{folder}", {"download_dir": tmp_path / "cache", "max_num_seqs": 8}
    limit = sum(path.stat().st_size for path in folder.iterdir()) + 100
    expected = LLM(folder, max_num_seqs=8).generate("abc", PARAMS)[0].outputs
    other: dict[str, Any] = {"directory": tmp_path / "cache", "max_bytes": limit}
    copy = tmp_path / "other"
    shutil.copytree(folder, copy)
    with LLM(url, weight_cache_gib=limit / 2**30, **settings) as llm:
        assert llm.generate("abc", PARAMS)[0].outputs == expected
        with pytest.raises(UserError, match="models in use"):
            WeightStore(**other).hold(f"file://{copy}")
    with WeightStore(**other).hold(f"file://{copy}") as held:
        assert len(list((tmp_path / "cache").glob("*/model"))) == 1 and held.path.is_dir()


def test_an_unknown_option_is_named_with_the_nearest_known_one(make_folder: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"LLM has no 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        LLM(make_folder(), max_num_seq=3)


def test_an_llm_of_engine_args_is_that_of_the_same_keywords(make_folder: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "batching": "dynamic", "kv_cache_tokens": 512, "swap_space": 2**-12, "enable_lora": True, "max_loras": 2}
    with LLM(make_folder(), **options) as one, LLM.from_engine_args(EngineArgs(model=str(make_folder()), **options)) as other:
        assert one.engine.settings == other.engine.settings
        # 2 layers x 2 (key, value) x 2 heads x 16 components x 4 bytes: 512 bytes per token, 8 KiB per block of 16 tokens.
        assert one.engine.settings.swap_blocks == 2**18 // 2**13 and one.engine.settings.num_blocks == 512 // 16
        assert one.engine.settings.admission == "dynamic" and one.engine.settings.max_loras == 2
