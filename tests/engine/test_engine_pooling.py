"""Embeddings and scores: the values of transformers, the bits of a request alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from tandem import LLM, PoolingParams, SamplingParams
from tandem.engine.pooling.pairs import cosine_similarity
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

TEXTS = ["hello world", "a", "the quick brown fox jumps over the lazy dog 0123456789", "the quick brown fox jumps over the lazy cat", "x" * 100]
Folders = Callable[..., Path]


def modules(folder: Path, target: Path, pooling: dict[str, Any], *more: str) -> Path:
    """Writes the folder of Sentence Transformers: that of a model saved without a head, and the modules after it."""
    transformers.AutoModel.from_pretrained(folder).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, target / name)
    listed = ["Transformer", "Pooling", *more]
    content = [{"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(listed)]
    (target / "modules.json").write_text(json.dumps(content))
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return target


def states(folder: Path, tokens: list[int]) -> Tensor:
    """Returns the hidden states [T, H] after the final norm by transformers, in float64."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0]


def reward_folder(folder: Path, target: Path, seed: int = 0, kind: Any = transformers.AutoModelForSequenceClassification) -> Path:
    """Writes a model with one score, as transformers draws its head."""
    torch.manual_seed(seed)
    model = kind.from_pretrained(folder, num_labels=1, id2label={0: "good"})
    model.score.weight.data.mul_(20)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, target / name)
    return target


def close(given: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(given, dtype=torch.float64), wanted, rtol=2e-5, atol=2e-6)


def test_a_model_of_sentence_transformers_embeds_by_its_last_token(make_folder: Folders, tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    folder = modules(make_folder(), tmp_path / "m", pooling, "Normalize")
    llm = LLM(folder, max_num_batched_tokens=24, max_num_seqs=4)
    outputs = llm.embed(TEXTS)
    for output in outputs:
        close(output.outputs.embedding, torch.nn.functional.normalize(states(folder, output.prompt_token_ids)[-1], dim=0))
    raw = llm.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=False))[0]
    close(raw.outputs.embedding, states(folder, raw.prompt_token_ids)[-1])
    pair = llm.score(TEXTS[2], TEXTS)
    for output, other in zip(pair, outputs, strict=True):
        query, document = (torch.tensor(each.outputs.embedding, dtype=torch.float64) for each in (outputs[2], other))
        close(output.outputs.score, torch.nn.functional.cosine_similarity(query, document, dim=0))
    with pytest.raises(UserError, match="this engine embeds texts and generates none"):
        llm.generate(TEXTS[:1], SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="pooling task is 'classify' and the model embeds texts; it can do embed, token_embed"):
        llm.classify(TEXTS[0])
    with pytest.raises(UserError, match="was not trained to have fewer"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))


def test_the_bits_of_an_embedding_do_not_depend_on_batch_chunks_or_cache(make_folder: Folders) -> None:
    for pooling_type in ("LAST", "MEAN"):
        options: dict[str, Any] = {"convert": "embed", "pooler_config": {"pooling_type": pooling_type}, "max_num_seqs": 4}
        alone = LLM(make_folder(), max_num_batched_tokens=4096, enable_prefix_caching=False, **options)
        wanted = [alone.embed(text)[0].outputs.embedding for text in TEXTS]
        # Chunks of at most 7 tokens, blocks for fewer sequences than are asked for, and prefixes that are found the second time.
        small = LLM(make_folder(), max_num_batched_tokens=7, kv_cache_tokens=160, **options)
        for _ in range(2):
            outputs = small.embed(TEXTS * 2)
            assert [output.outputs.embedding for output in outputs] == wanted * 2
            small.engine.check_integrity()
        cached = {output.num_cached_tokens > 0 for output in outputs if len(output.prompt_token_ids) > 16}
        assert cached == ({True} if pooling_type == "LAST" else {False})


def test_the_mean_of_all_tokens(make_folder: Folders, tmp_path: Path) -> None:
    folder = modules(make_folder("mistral"), tmp_path / "m", {"embedding_dimension": 32, "pooling_mode": "mean"})
    for output in LLM(folder, max_num_batched_tokens=16, max_num_seqs=2).embed(TEXTS):
        close(output.outputs.embedding, states(folder, output.prompt_token_ids).mean(0))


def test_a_reward_model_scores_as_transformers_does(make_folder: Folders, tmp_path: Path) -> None:
    folder = reward_folder(make_folder("qwen2"), tmp_path / "m")
    llm = LLM(folder, max_num_batched_tokens=16, max_num_seqs=4)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    for text, output, raw in zip(TEXTS, llm.classify(TEXTS), llm.encode(TEXTS, PoolingParams(use_activation=False)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        close(raw.outputs.data, logits)
        close(output.outputs.probs, logits.sigmoid())
        (whole,) = llm.encode(text, PoolingParams(use_activation=False), pooling_task="token_classify")
        assert whole.outputs.data.shape == (len(text), 1) and torch.equal(whole.outputs.data[-1], raw.outputs.data)
    # A cross encoder reads the two texts one after the other.
    assert llm.score("hello ", ["world"])[0].outputs.score == llm.classify("hello world")[0].outputs.probs[0]


def test_two_words_rerank_as_the_formula_of_qwen3_reranker(make_folder: Folders) -> None:
    folder = make_folder("llama")
    template = "{{ messages[0].role }} {{ messages[0].content }} {{ messages[1].role }} {{ messages[1].content }} {{ instruction or 'none' }}"
    llm = LLM(folder, hf_overrides={"classifier_from_token": ["n", "y"]}, max_num_seqs=4, max_num_batched_tokens=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = Tokenizer.from_folder(folder)
    no, yes = (tokenizer.backend.token_to_id(word) for word in "ny")
    for document, output in zip(TEXTS[:3], llm.score("who", TEXTS[:3], chat_template=template), strict=True):
        tokens = tokenizer.encode(f"query who document {document} none")
        assert output.prompt_token_ids == tokens
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        close(output.outputs.score, torch.stack([logits[no], logits[yes]]).softmax(0)[1])
    with pytest.raises(UserError, match="'data_1' has 2 texts and 'data_2' 3; give one, or as many"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(UserError, match="classifier_from_token has 'nein', which is not a token"):
        LLM(folder, hf_overrides={"classifier_from_token": ["nein", "y"]})


def test_matryoshka_embeddings_are_cut_before_they_are_normalized(make_folder: Folders) -> None:
    folder = make_folder()
    llm = LLM(folder, runner="pooling", hf_overrides={"is_matryoshka": True}, max_num_seqs=4)
    (output,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
    close(output.outputs.embedding, torch.nn.functional.normalize(states(folder, output.prompt_token_ids)[-1, :8], dim=0))
    with pytest.raises(UserError, match="pooling dimensions is 33; the model has 32"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=33))
    (tokens,) = llm.encode({"prompt_token_ids": [5, 6, 7]}, PoolingParams(use_activation=False), pooling_task="token_embed")
    close(tokens.outputs.data, states(folder, [5, 6, 7]))


def test_an_embedding_may_fill_the_context_and_not_exceed_it(make_folder: Folders) -> None:
    llm = LLM(make_folder(), runner="pooling", max_model_len=32, max_num_seqs=2)
    (output,) = llm.embed({"prompt_token_ids": [5] * 32})
    close(output.outputs.embedding, torch.nn.functional.normalize(states(make_folder(), [5] * 32)[-1], dim=0))
    with pytest.raises(UserError, match=r"the prompt has 33 tokens, more than max_model_len \(32\)"):
        llm.embed({"prompt_token_ids": [5] * 33})


def test_an_update_between_two_chunks_starts_an_embedding_again(make_folder: Folders) -> None:
    from tandem.model.huggingface.model_folder import trunk_tensors
    from tandem.types import WeightVersion

    options: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}, "max_num_seqs": 2}
    llm = LLM(make_folder(), max_num_batched_tokens=8, **options)
    engine, tokens = llm.engine, list(range(3, 33))
    engine.add_request("r", tokens, PoolingParams())
    engine.step()
    llm.update_weights(trunk_tensors(make_folder("qwen3", 1)), WeightVersion(0, 1))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    wanted = LLM(make_folder("qwen3", 1), **options).embed({"prompt_token_ids": tokens})[0].outputs.embedding
    assert outputs[0].pooled is not None and outputs[0].pooled.rows() == [wanted] and outputs[0].pooled.weight_version == (0, 1)
    engine.add_request("gone", tokens, PoolingParams())
    engine.step()
    assert engine.abort("gone") and engine.step()[0].pooled is None
    engine.check_integrity()


@pytest.mark.parametrize(("options", "text"), [
    ({"runner": "generate", "convert": "embed"}, "set runner to pooling"),
    ({"convert": "classify"}, "has no score; name a model for sequence classification"),
    ({"runner": "pooling", "convert": "none"}, "set convert to embed or classify"),
    ({"runner": "pooling", "pooler_config": {"pooling_type": "CLS"}}, "pooling_type"),
    ({"runner": "pooling", "pooler_config": {"dimensions": 33}}, "pooler_config dimensions is 33; the embeddings"),
    ({"runner": "pooling", "pooler_config": {"dimensions": 0}}, "pooler_config dimensions is 0; it must be at least 1"),
    ({"runner": "pooling", "hf_overrides": {"rope_theta": 1}}, "hf_overrides has 'rope_theta'"),
    ({"runner": "pooling", "hf_overrides": {"classifier_from_token": "yes"}}, "classifier_from_token is 'yes'"),
    ({"runner": "pooling", "speculative_config": {"method": "ngram"}}, "which draws no tokens, and speculative_config is given"),
])  # fmt: skip
def test_options_that_cannot_work_are_one_line(make_folder: Folders, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        LLM(make_folder(), **options)


def test_an_engine_that_generates_says_how_to_embed(make_folder: Folders) -> None:
    llm = LLM(make_folder(), max_num_seqs=2)
    for call in (lambda: llm.embed("a"), lambda: llm.encode("a"), lambda: llm.classify("a"), lambda: llm.score("a", "b")):
        with pytest.raises(UserError, match="this engine generates text and pools nothing; start it with runner 'pooling'"):
            call()


def test_modules_that_are_not_supported_are_named(make_folder: Folders, tmp_path: Path) -> None:
    folder = modules(make_folder(), tmp_path / "weighted", {"pooling_mode": "mean"}, "WeightedLayerPooling")
    with pytest.raises(UserError, match="has the module 'WeightedLayerPooling'; supported are"):
        LLM(folder)
    folder = modules(make_folder(), tmp_path / "max", {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True})
    with pytest.raises(UserError, match="has the pooling mode 'max_tokens and mean_tokens'; supported are lasttoken, mean"):
        LLM(folder)


def test_the_cosine_of_two_vectors() -> None:
    assert cosine_similarity([3.0, 4.0], [4.0, 3.0]) == pytest.approx(24 / 25, abs=1e-15) and cosine_similarity([0.0], [1.0]) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"])
def test_every_family_embeds_and_scores(make_folder: Folders, tmp_path: Path, architecture: str) -> None:
    folder = make_folder(architecture)
    for output in LLM(folder, convert="embed", max_num_batched_tokens=16, max_num_seqs=4).embed(TEXTS):
        close(output.outputs.embedding, torch.nn.functional.normalize(states(folder, output.prompt_token_ids)[-1], dim=0))
    scored = reward_folder(folder, tmp_path / "m")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(scored, dtype=torch.float64, experts_implementation="eager")
    for output in LLM(scored, max_num_batched_tokens=16, max_num_seqs=4).classify(TEXTS):
        with torch.no_grad():
            close(output.outputs.probs, model(torch.tensor([output.prompt_token_ids])).logits[0].sigmoid())


@pytest.mark.full
def test_two_ranks_have_the_bits_of_one(make_folder: Folders, tmp_path: Path, ranks: Callable[..., LLM]) -> None:
    reward = reward_folder(make_folder(), tmp_path / "m")
    cases: list[tuple[Path, dict[str, Any]]] = [
        (make_folder(), {"convert": "embed"}), (reward, {}), (make_folder(), {"hf_overrides": {"classifier_from_token": ["n", "y"]}})
    ]  # fmt: skip
    for folder, options in cases:
        one = LLM(folder, max_num_seqs=16, max_num_batched_tokens=64, **options)
        two = ranks(folder, **options)
        for a, b in zip(one.encode(TEXTS), two.encode(TEXTS), strict=True):
            assert torch.equal(a.outputs.data, b.outputs.data)


@pytest.mark.full
def test_a_critic_values_each_token(make_folder: Folders, tmp_path: Path) -> None:
    folder = reward_folder(make_folder(), tmp_path / "m", kind=transformers.AutoModelForTokenClassification)
    llm = LLM(folder, max_num_batched_tokens=16, max_num_seqs=4)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64)
    for output in llm.encode(TEXTS, PoolingParams(use_activation=False)):
        with torch.no_grad():
            close(output.outputs.data, model(torch.tensor([output.prompt_token_ids])).logits[0])


def test_several_labels_are_a_distribution_or_each_for_itself_as_the_folder_says(make_folder: Folders, tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = {0: "good", 1: "bad", 2: "ugly"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(make_folder(), num_labels=3, id2label=names)
    model.score.weight.data.mul_(20)
    for kind, activation in ((None, lambda x: x.softmax(0)), ("multi_label_classification", torch.sigmoid)):
        folder = tmp_path / str(kind)
        model.config.problem_type = kind
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(make_folder() / name, folder / name)
        exact = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
        llm = LLM(folder, max_num_batched_tokens=16, max_num_seqs=4)
        outputs = llm.classify(TEXTS)
        for text, output in zip(TEXTS, outputs, strict=True):
            with torch.no_grad():
                logits = exact(torch.tensor([output.prompt_token_ids])).logits[0]
            close(output.outputs.probs, activation(logits))
            (raw,) = llm.encode(text, PoolingParams(use_activation=False), pooling_task="token_classify")
            assert raw.outputs.data.shape == (len(output.prompt_token_ids), 3)
            close(raw.outputs.data[-1], logits)
            assert llm.classify(text)[0].outputs.probs == output.outputs.probs
        with pytest.raises(UserError, match="a score of a pair is one number and the model has 3 labels"):
            llm.score("a", "b")


def dense(folder: Path, inputs: int, outputs: int, activation: str, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Writes a ``Dense`` module; returns its weights in float64."""
    folder.mkdir()
    weight, shift = torch.randn(outputs, inputs), torch.randn(outputs) * bias
    safetensors.torch.save_file({"linear.weight": weight} | ({"linear.bias": shift} if bias else {}), folder / "model.safetensors")
    content = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": f"torch.nn.modules.{activation}"}
    (folder / "config.json").write_text(json.dumps(content))
    return weight.double(), shift.double()


def test_dense_modules_follow_the_pooling(make_folder: Folders, tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = modules(make_folder(), tmp_path / "m", {"pooling_mode": "mean"}, "Dense", "Dense", "Normalize")
    (first, shift), (second, _) = dense(folder / "2_Dense", 32, 48, "activation.Tanh"), dense(folder / "3_Dense", 48, 12, "linear.Identity", bias=False)
    llm = LLM(folder, max_num_batched_tokens=16, max_num_seqs=4)
    outputs = llm.embed(TEXTS)
    for text, output in zip(TEXTS, outputs, strict=True):
        wanted = second @ torch.tanh(first @ states(folder, output.prompt_token_ids).mean(0) + shift)
        close(output.outputs.embedding, torch.nn.functional.normalize(wanted, dim=0))
        assert llm.embed(text)[0].outputs.embedding == output.outputs.embedding
    with pytest.raises(UserError, match="pooling dimensions is 32; the model has 12"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=32))


@pytest.mark.parametrize(("changes", "says"), [
    ({"in_features": 31}, "has in_features 31 and the vectors before it have 32"),
    ({"out_features": 9}, "tensor 'linear.weight' is \\[8, 32\\] and config.json says \\[9, 32\\]"),
    ({"out_features": "8"}, "has out_features 8; it must be a whole number"),
    ({"bias": False}, "has the tensors linear.bias, linear.weight; a Dense module has linear.weight"),
    ({"activation_function": "mine.Strange"}, "has the activation_function 'Strange'; supported are torch's Identity, Tanh"),
    ({"module_input_name": "token_embeddings"}, "has module_input_name 'token_embeddings'"),
    (None, "has no model.safetensors \\(pytorch_model.bin is a pickle, which is never read\\)"),
])  # fmt: skip
def test_a_dense_module_that_cannot_be_read_is_one_line(changes: dict[str, Any] | None, says: str, make_folder: Folders, tmp_path: Path) -> None:
    folder = modules(make_folder(), tmp_path / "m", {"pooling_mode": "mean"}, "Dense")
    dense(folder / "2_Dense", 32, 8, "activation.Tanh")
    path = folder / "2_Dense" / "config.json"
    if changes is None:
        (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=says) as error:
        LLM(folder, max_num_seqs=2)
    assert "\n" not in str(error.value)


def test_modules_in_another_order_are_refused(make_folder: Folders, tmp_path: Path) -> None:
    folder = modules(make_folder(), tmp_path / "m", {"pooling_mode": "mean"}, "Normalize", "Dense")
    with pytest.raises(UserError, match="has the modules Transformer, Pooling, Normalize, Dense; supported are Transformer, Pooling, Dense, Normalize"):
        LLM(folder, max_num_seqs=2)
