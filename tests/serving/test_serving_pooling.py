"""Embeddings, scores and rerank over HTTP: those of ``LLM``, in the forms of OpenAI, vLLM, Jina and Cohere."""

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from pooling_models import reward_model, sentence_transformer
from server_process import Server, server

from tandem import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams, UserError
from tandem.engine.pooling.pairs import cosine_similarity
from tandem.text.tokenizer import Tokenizer

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog 你好"]


@pytest.fixture(scope="module")
def embedder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_transformer(model, tmp_path_factory.mktemp("embedder") / "m")


@pytest.fixture(scope="module")
def embedding_server(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(embedder, tmp_path_factory.mktemp("serve"), "--served-model-name", "tiny", "--hf-overrides", '{"is_matryoshka": true}') as running:
        yield running
        assert running.process.poll() is None and "Traceback" not in running.log.read_text(), running.log.read_text()


@pytest.fixture(scope="module")
def wanted(embedder: Path) -> list[list[float]]:
    return [output.outputs.embedding for output in LLM(embedder, max_num_seqs=8).embed(TEXTS)]


def posted(running: Server, path: str, **body: Any) -> Any:
    response = running.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(running: Server, path: str, **body: Any) -> str:
    response = running.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_the_openai_client_reads_embeddings(embedding_server: Server, wanted: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none")
    # The client asks for base64 unless a format is given.
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny", input=TEXTS, **more)  # type: ignore[arg-type]
        assert [each.embedding for each in answer.data] == wanted and [each.index for each in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    cut = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=4).data[0].embedding
    norm = sum(x * x for x in wanted[0][:4]) ** 0.5
    assert cut == pytest.approx([x / norm for x in wanted[0][:4]], rel=1e-5)

    async def asynchronous() -> list[float]:
        async with openai.AsyncOpenAI(base_url=f"{embedding_server.url}/v1", api_key="none") as async_client:
            return (await async_client.embeddings.create(model="tiny", input=TEXTS[1])).data[0].embedding

    assert asyncio.run(asynchronous()) == wanted[1]


def test_inputs_in_each_form_have_the_bits_of_the_engine(embedding_server: Server, embedder: Path, wanted: list[list[float]]) -> None:
    tokens = [Tokenizer.from_folder(embedder).encode(text, add_special_tokens=True) for text in TEXTS]
    for given in (TEXTS[0], tokens[0], [TEXTS[0]], [tokens[0]]):
        assert [each["embedding"] for each in posted(embedding_server, "/v1/embeddings", input=given)["data"]] == wanted[:1]
        assert posted(embedding_server, "/invocations", input=given)["data"][0]["embedding"] == wanted[0]
    body = posted(embedding_server, "/pooling", input=tokens, encoding_format="base64")
    assert [list(struct.unpack(f"{len(wanted[0])}f", base64.b64decode(each["data"]))) for each in body["data"]] == wanted
    assert body["weight_versions"] == [[0, 0]] and body["model"] == "tiny" and body["usage"]["prompt_tokens"] == sum(map(len, tokens))
    kept = posted(embedding_server, "/v1/embeddings", input=TEXTS[0], truncate_prompt_tokens=3)
    assert kept["usage"]["prompt_tokens"] == 3
    for body in ({"query": TEXTS[0], "documents": TEXTS[1:]}, {"text_1": TEXTS[0], "text_2": TEXTS[1]}, {"input": TEXTS[0], "task": "token_embed"}):
        path = "/rerank" if "query" in body else "/score" if "text_1" in body else "/pooling"
        (found, asked) = (posted(embedding_server, each, **body) for each in ("/invocations", path))
        assert found.get("results", found.get("data")) == asked.get("results", asked.get("data"))
    assert kept["data"] == posted(embedding_server, "/v1/embeddings", input=tokens[0][:3])["data"]
    left = posted(embedding_server, "/v1/embeddings", input=TEXTS[0], truncate_prompt_tokens=3, truncation_side="left")
    assert left["data"] == posted(embedding_server, "/v1/embeddings", input=tokens[0][-3:])["data"]
    chat = posted(embedding_server, "/v1/embeddings", messages=[{"role": "user", "content": "hi"}])
    assert chat["data"] == posted(embedding_server, "/v1/embeddings", input="[user] hi\n")["data"]


def test_a_model_that_embeds_scores_and_reranks_by_cosine(embedding_server: Server, wanted: list[list[float]]) -> None:
    cosines = [cosine_similarity(wanted[0], each) for each in wanted]
    for path, names in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents"))):
        body = posted(embedding_server, path, **{names[0]: TEXTS[0], names[1]: TEXTS})
        assert body["data"] == [{"index": i, "object": "score", "score": score} for i, score in enumerate(cosines)]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = posted(embedding_server, path, query=TEXTS[0], documents=TEXTS, top_n=2)["results"]
        assert results[0] == {"index": 0, "relevance_score": cosines[0], "document": {"text": TEXTS[0]}} and len(results) == 2
        assert results[1]["relevance_score"] == sorted(cosines)[-2]


def test_what_a_model_cannot_do_is_one_error(embedding_server: Server, shared: Server) -> None:
    assert "embeds texts and generates none" in refused(embedding_server, "/v1/completions", prompt="a")
    assert "embeds texts and has no score" in refused(embedding_server, "/classify", input="a")
    assert "give either 'input' or 'messages'" in refused(embedding_server, "/v1/embeddings")
    assert "'input' is empty" in refused(embedding_server, "/v1/embeddings", input=[])
    assert "pooling dimensions is 33; the model has 32" in refused(embedding_server, "/v1/embeddings", input="a", dimensions=33)
    assert "give 'text_1' and 'text_2'" in refused(embedding_server, "/score", text_1="a")
    assert "'text_1' has 2 texts and 'text_2' 3" in refused(embedding_server, "/score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert "compares their vectors" in refused(embedding_server, "/rerank", query="a", documents=["b"], instruction="find")
    assert "'normalize' is not supported" in refused(embedding_server, "/v1/embeddings", input="a", normalize=True)
    texts, pair = {"input": "a"}, {"query": "a", "documents": "b"}
    for path, body in (("/v1/embeddings", texts), ("/classify", texts), ("/pooling", texts), ("/rerank", pair)):
        assert "generates text and neither embeds nor scores it" in refused(shared, path, **body)
    assert embedding_server.post("/v1/embeddings", {"input": "a", "model": "other"}).status_code == 404


@pytest.mark.full
def test_a_reward_model_classifies_and_reranks(model: Path, tmp_path: Path) -> None:
    folder = reward_model(model, tmp_path / "m")
    llm = LLM(folder, max_num_seqs=8)
    probabilities = [output.outputs.probs for output in llm.classify(TEXTS)]
    with server(folder, tmp_path) as running:
        body = posted(running, "/classify", input=TEXTS)
        assert body["data"] == [{"index": i, "label": "good", "probs": probs, "num_classes": 1} for i, probs in enumerate(probabilities)]
        raw = llm.encode(TEXTS[0], PoolingParams(use_activation=False))[0].outputs.data.tolist()
        assert posted(running, "/pooling", input=TEXTS[0], use_activation=False)["data"][0]["data"] == raw
        each = llm.encode(TEXTS[0], pooling_task="token_classify")[0].outputs.data.tolist()
        assert posted(running, "/pooling", input=TEXTS[0], task="token_classify")["data"][0]["data"] == each
        scores = [output.outputs.score for output in llm.score("who", TEXTS)]
        results = posted(running, "/rerank", query="who", documents=TEXTS, return_documents=False)["results"]
        order = sorted(range(3), key=lambda i: -scores[i])
        assert results == [{"index": i, "relevance_score": scores[i]} for i in order]
        assert "scores texts and embeds none" in refused(running, "/v1/embeddings", input="a")
        assert "scores texts and generates none" in refused(running, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert "max_tokens_per_doc" not in json.dumps(posted(running, "/rerank", query="who", documents=TEXTS, max_tokens_per_doc=2))


@pytest.mark.full
def test_pairs_whose_template_computes_for_long_do_not_delay_other_requests(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "pairs.jinja"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template.write_text("{% if messages[0].content == 'slow' %}" + endless + "{% endif %}{{ messages[0].content }}{{ messages[1].content }}")
    with server(reward_model(model, tmp_path / "m"), tmp_path, "--chat-template", str(template)) as running, ThreadPoolExecutor(1) as thread:
        wanted = posted(running, "/score", text_1="who", text_2=TEXTS)["data"]
        slow = thread.submit(refused, running, "/rerank", query="slow", documents=TEXTS)
        for _ in range(5):
            assert posted(running, "/score", text_1="who", text_2=TEXTS)["data"] == wanted
        assert not slow.done()
        assert "it takes more than 10 seconds of processor time, as one that loops without end" in slow.result()


@pytest.mark.full
def test_a_reranker_by_two_words_has_the_prompt_of_its_model_card(model: Path, tmp_path: Path) -> None:
    overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}
    llm = LLM(model, hf_overrides=overrides, max_num_seqs=8)
    card = (
        '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. '
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n'
        '<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
    )
    default = "Given a web search query, retrieve relevant passages that answer the query"
    prompts = [card.format(instruction, "who", text) for instruction in (default, "Find it") for text in TEXTS]
    tokenizer = llm.get_tokenizer()
    outputs = llm.encode([{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts], pooling_task="classify")
    scores = [float(output.outputs.data) for output in outputs]
    assert [output.outputs.score for output in llm.score("who", TEXTS)] == scores[:3]
    with server(model, tmp_path, "--hf-overrides", json.dumps(overrides)) as running:
        assert [each["score"] for each in posted(running, "/score", text_1="who", text_2=TEXTS)["data"]] == scores[:3]
        assert [each["score"] for each in posted(running, "/score", text_1="who", text_2=TEXTS, instruction="Find it")["data"]] == scores[3:]


@pytest.mark.full
def test_asynchronous_programs_have_the_vectors_and_scores_of_an_llm(embedder: Path, model: Path, tmp_path: Path, wanted: list[list[float]]) -> None:
    async def embedded(engine: AsyncLLM) -> list[list[float]]:
        return [each.outputs.embedding for each in await asyncio.gather(*(engine.embed(text, f"e{i}") for i, text in enumerate(TEXTS)))]

    async def pooled(engine: AsyncLLM) -> None:
        (each,) = [output async for output in engine.encode(TEXTS[0], PoolingParams(task="token_embed"), "tokens")]
        assert each.request_id == "tokens" and each.outputs.data[-1].tolist() == pytest.approx(wanted[0], abs=1e-6)
        assert (await engine.score(TEXTS[0], TEXTS[1], "pair")).outputs.score == cosine_similarity(wanted[0], wanted[1])
        with pytest.raises(UserError, match="pooling task is 'classify' and the model embeds texts"):
            await engine.classify(TEXTS[0], "class")
        with pytest.raises(UserError, match="this engine embeds texts and generates none"):
            [output async for output in engine.generate(TEXTS[0], SamplingParams(max_tokens=1), "text")]

    with AsyncLLM.from_engine_args(EngineArgs(model=str(embedder), max_num_seqs=8)) as engine:
        assert asyncio.run(embedded(engine)) == wanted
        asyncio.run(pooled(engine))
    folder = reward_model(model, tmp_path / "reward")
    reward = LLM(folder, max_num_seqs=4)
    with AsyncLLM.from_engine_args(EngineArgs(model=str(folder), max_num_seqs=8)) as engine:
        assert asyncio.run(engine.score(TEXTS[0], TEXTS[1], "pair")).outputs == reward.score(TEXTS[0], TEXTS[1])[0].outputs
        assert asyncio.run(engine.classify(TEXTS[2], "class")).outputs == reward.classify(TEXTS[2])[0].outputs


def test_a_generating_engine_refuses_to_pool(model: Path) -> None:
    with AsyncLLM.from_engine_args(EngineArgs(model=str(model), max_num_seqs=8)) as engine:
        for ask in (engine.embed(TEXTS[0], "a"), engine.score(TEXTS[0], TEXTS[1], "b")):
            with pytest.raises(UserError, match="this engine generates text and pools nothing"):
                asyncio.run(ask)


def test_classes_have_the_name_of_the_likeliest_label(model: Path, tmp_path: Path) -> None:
    folder = reward_model(model, tmp_path / "m", {0: "good", 1: "bad", 2: "ugly"})
    wanted = [output.outputs.probs for output in LLM(folder, max_num_seqs=4).classify(TEXTS)]
    with server(folder, tmp_path) as running:
        data = posted(running, "/classify", input=TEXTS)["data"]
        assert [each["probs"] for each in data] == wanted and all(each["num_classes"] == 3 for each in data)
        assert [each["label"] for each in data] == [("good", "bad", "ugly")[probs.index(max(probs))] for probs in wanted]
        assert "is one number and the model has 3 labels" in refused(running, "/score", text_1="a", text_2="b")
        assert posted(running, "/invocations", input=TEXTS)["data"] == data


@pytest.mark.full
def test_an_engine_that_is_killed_is_replaced_and_the_embeddings_come(embedder: Path, tmp_path: Path, wanted: list[list[float]]) -> None:
    import os
    import signal

    with server(embedder, tmp_path) as running:
        running.control("/pause?mode=recompute")
        (engine,) = running.engines()
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(posted, running, "/v1/embeddings", input=TEXTS)
            os.kill(engine, signal.SIGKILL)
            from http_processes import until

            until(lambda: running.get("/readiness").status_code == 200 and running.engines() not in ([], [engine]), "the engine to be back")
            running.control("/resume")
            assert [each["embedding"] for each in answer.result()["data"]] == wanted
        running.wait_idle()


@pytest.mark.full
def test_schemathesis_finds_nothing_where_a_model_embeds(embedder: Path, tmp_path: Path) -> None:
    from test_serving_schema import fuzz

    with server(embedder, tmp_path) as running:
        fuzz(running, 4, seed=2)
