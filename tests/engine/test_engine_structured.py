"""Structured output of models with random weights: finished completions always parse, in any batch and after preemption."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.structured_output.manager import GrammarCursor, StructuredOutputManager
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer as Text
from tandem.types import UserError

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "left": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}-(0|[1-9][0-9]{0,3})(\.[0-9]{2})?"
CHOICE = ("yes", "yes, please", "no", "no?")
GRAMMAR = """
start: sum
sum: product ("+" product)~0..2
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


@pytest.fixture(scope="module", params=["characters", "byte-level BPE"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over ASCII, with eight more ids than its tokenizer has."""
    tokens = tmp_path_factory.mktemp("ascii")
    make_character_tokenizer("ascii", tokens)
    if request.param != "characters":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<pad>", "<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        backend.train_from_iterator([json.dumps(SCHEMA), REGEX, GRAMMAR, *CHOICE] * 3, trainer)
        backend.save(str(tokens / "tokenizer.json"))
    shapes = ModelShapes("qwen3", Text.from_folder(tokens).vocab_size + 8, 32, 2, 4, 2, 16, 48, 256, True, qk_norm=True)
    decoder = Decoder(shapes, select("reference"))
    initialise(decoder, 0)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            if not name.endswith("norm.weight"):
                tensor.mul_(5 if "proj" in name else 2)
    made = tmp_path_factory.mktemp("models") / "ascii"
    save_model(decoder, made, tokens)
    return made


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"max_num_seqs": 64, "max_num_batched_tokens": 128, **settings})


def completions(llm: LLM, wanted: StructuredOutputsParams, **params: Any) -> list[CompletionOutput]:
    (answer,) = llm.generate("a", SamplingParams(**{"n": 60, "seed": 1, "max_tokens": 200, "structured_outputs": wanted, **params}))
    llm.engine.check_integrity()
    return answer.outputs


def finished(found: list[CompletionOutput]) -> list[str]:
    """Returns the texts that ended with the end token: most of them, and not all equal."""
    texts = [c.text for c in found if c.finish_reason == "stop"]
    assert len(texts) > len(found) // 2 and len(set(texts)) > 1
    return texts


def test_a_json_schema_holds_for_every_completion(folder: Path) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA)
    for wanted in (
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        StructuredOutputsParams(json=json.dumps(SCHEMA), whitespace_pattern=" ?"),
    ):
        for text in finished(completions(make(folder), wanted)):
            assert validator.is_valid(json.loads(text)), text
    for text in finished(completions(make(folder), StructuredOutputsParams(json_object=True), max_tokens=250)):
        assert isinstance(json.loads(text), dict)


def test_a_regex_a_choice_and_a_grammar_hold_for_every_completion(folder: Path) -> None:
    llm = make(folder)
    assert all(re.fullmatch(REGEX, text) for text in finished(completions(llm, StructuredOutputsParams(regex=REGEX))))
    assert set(finished(completions(llm, StructuredOutputsParams(choice=CHOICE), temperature=2.0))) == set(CHOICE)
    product = r"([1-9][0-9]{0,2}|\([1-9][0-9]{0,2}\*[1-9][0-9]{0,2}\))"
    for text in finished(completions(llm, StructuredOutputsParams(grammar=GRAMMAR))):
        assert re.fullmatch(rf"{product}(\+{product}){{0,2}}", text)
    gbnf = 'root ::= ("ab" | "c") root | "!"'
    assert all(re.fullmatch("(ab|c)*!", text) for text in finished(completions(llm, StructuredOutputsParams(grammar=gbnf))))


def test_greedy_and_filtered_draws_match_too(folder: Path) -> None:
    wanted, llm = StructuredOutputsParams(regex=REGEX), make(folder)
    for params in ({"n": 1, "temperature": 0}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"repetition_penalty": 1.5}):
        found = completions(llm, wanted, **params)
        assert all(re.fullmatch(REGEX, c.text) for c in found) and {c.finish_reason for c in found} == {"stop"}


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 16, "max_num_seqs": 7}, {"kv_cache_tokens": 512}, {"enable_prefix_caching": False}],
    ids=["small steps", "preemption", "no cache"],
)
def test_masks_are_the_same_in_any_batch_and_unconstrained_neighbours_keep_their_bits(folder: Path, settings: dict[str, Any]) -> None:
    kinds = [{"json": SCHEMA}, {"regex": REGEX}, {"choice": CHOICE}, {"grammar": GRAMMAR}]
    free = SamplingParams(n=3, seed=4, max_tokens=60)
    params = [SamplingParams(n=3, seed=4, max_tokens=60, logprobs=2, structured_outputs=StructuredOutputsParams(**kind)) for kind in kinds]
    prompts = ["a", "sort 4 1", "{", "the quick brown fox jumps", "x" * 40]
    llm = make(folder, kv_cache_tokens=4096)
    expected = [a.outputs for a in llm.generate(prompts, [*params, free])]
    assert [a.outputs for a in make(folder, **settings).generate(prompts, [*params, free])] == expected
    alone = [llm.generate(prompt, own, request_keys=[i])[0].outputs for i, (prompt, own) in enumerate(zip(prompts, [*params, free], strict=True))]
    assert alone == expected
    assert llm.generate(prompts, free)[-1].outputs == expected[-1]
    entry = expected[1][0]
    assert entry.raw_logprobs[0] < entry.sampling_logprobs[0], "the raw log-probability is of the model, not of the mask"


def test_a_place_in_a_grammar_is_a_function_of_the_tokens_alone(folder: Path) -> None:
    text = Text.from_folder(folder)
    start = StructuredOutputManager(text, text.vocab_size + 8).compile(StructuredOutputsParams(json=SCHEMA))
    drawn = [*text.encode('{"name":"ab\\n", "age": 17,"tags":["red","blue"]}'), 2, 2]
    drafts = [drawn[:k] + other for k in range(len(drawn)) for other in ([], text.encode("}"), text.encode("{{"))]

    def mask(cursor: GrammarCursor, output: list[int]) -> list[int]:
        words = torch.zeros(-(-(text.vocab_size + 8) // 32), dtype=torch.int32)
        cursor.fill(output, words)
        return words.tolist()

    fresh = [mask(GrammarCursor(start), output) for output in drafts]
    one = GrammarCursor(start)
    order = torch.randperm(len(drafts), generator=torch.Generator().manual_seed(0)).tolist()
    for i in [*range(len(drafts)), *order, *reversed(range(len(drafts)))]:
        assert mask(one, drafts[i]) == fresh[i], drafts[i]
    assert len({tuple(m) for m in fresh}) > 10


def test_what_else_ends_a_completion_still_does(folder: Path) -> None:
    llm, digits = make(folder), StructuredOutputsParams(regex="[0-9]+")
    assert {len(c.token_ids) for c in completions(llm, StructuredOutputsParams(regex="[0-9]{50}"), max_tokens=7)} == {7}
    for c in completions(llm, digits, min_tokens=6):
        assert len(c.token_ids) >= 6 and c.text.isdigit()
    cut = completions(llm, StructuredOutputsParams(regex="[0-9]{9}"), stop="7", temperature=3.0)
    assert all("7" not in c.text for c in cut) and {c.stop_reason for c in cut} == {None, "7"}
    # A text that is complete before min_tokens ends nevertheless, and ignore_eos adds nothing to it.
    assert {c.text for c in completions(llm, StructuredOutputsParams(choice=["ok"]), min_tokens=9)} == {"ok"}
    longer = completions(llm, StructuredOutputsParams(choice=["ok"]), ignore_eos=True, max_tokens=9)
    assert {(c.text, len(c.token_ids)) for c in longer} == {("ok", 9)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "has none; give exactly one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice"),
        ({"regex": 3}, "regex is 3"),
        ({"choice": "ab"}, "choice is 'ab'"),
        ({"choice": []}, "choice is \\[\\]"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": [1]}, "json is a list"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        StructuredOutputsParams(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "(a"}, "regex cannot be compiled: .*unclosed group"),
        ({"json": {"type": "foo"}}, "json cannot be compiled: Invalid type: foo"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json cannot be compiled: Unsatisfiable"),
        ({"grammar": "start: (a"}, "grammar cannot be compiled"),
        ({"grammar": "hello"}, "grammar cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_work(folder: Path, given: dict[str, Any], words: str) -> None:
    llm = make(folder)
    with pytest.raises(UserError, match=words) as caught:
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(**given))])
    assert "\n" not in str(caught.value) and not llm.engine.has_unfinished_requests


def test_a_text_that_the_vocabulary_cannot_begin_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="no token of the vocabulary can begin"):
        make_llm().generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA)))


def test_without_the_library_or_a_tokenizer_one_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(UserError, match="need a tokenizer"):
        make(folder, skip_tokenizer_init=True).generate({"prompt_token_ids": [3]}, params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'tandem-rl\[structured\]'"):
        make(folder).generate("a", params)
