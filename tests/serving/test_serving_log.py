"""The server's log, CORS, ignored fields, sampling defaults and a chat template of its own."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import Server, server, until

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

ORIGIN = "https://app.example"
TOKENS = r"(?:, (?P<prompt>\d+) prompt and (?P<generated>\d+) generated tokens)?"
LINE = re.compile(r'tandem: 127\.0\.0\.1 "(?P<request>[A-Z]+ \S+)" (?P<status>\d+)' + TOKENS + r", [\d.]+ s")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with sampling defaults, a chat template given to the server, and pages of one origin that may call it."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("defaults") / "model")
    content = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**content, "temperature": 0.0, "repetition_penalty": 1.2}))
    template = folder.parent / "short.jinja"
    template.write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    options = ("--allowed-origins", json.dumps([ORIGIN]), "--chat-template", str(template), "--override-generation-config", '{"top_k": 7}')
    with server(folder, folder.parent, *options, "--served_model_name=tiny") as started:
        yield started
        assert "Traceback" not in started.log.read_text(), started.log.read_text()


def requests_of(running: Server) -> list[dict[str, str]]:
    return [match.groupdict() for match in map(LINE.fullmatch, running.log.read_text().splitlines()) if match]


def test_each_request_is_a_line_without_its_text(running: Server) -> None:
    before = len(requests_of(running))
    usage = running.complete("the lazy dog", max_tokens=5)["usage"]
    running.complete_stream("secret words", max_tokens=3, n=2, temperature=1, ignore_eos=True)
    running.post("/generate", {"prompt": "the lazy dog", "sampling_params": {"max_tokens": 4, "ignore_eos": True}})
    running.post("/v1/completions", {"prompt": 1})
    running.get("/a%0Abc%22%1b?key=secret")
    running.get("/health")
    until(lambda: len(requests_of(running)) == before + 5, "the lines")
    lines = requests_of(running)[before:]
    assert lines[0] == {"request": "POST /v1/completions", "status": "200", "prompt": str(usage["prompt_tokens"]), "generated": str(usage["completion_tokens"])}
    assert lines[1]["generated"] == "6" and lines[2]["request"] == "POST /generate" and lines[2]["generated"] == "4"
    assert lines[3] == {"request": "POST /v1/completions", "status": "400", "prompt": None, "generated": None}
    assert lines[4]["request"] == "GET /a%0Abc%22%1b" and lines[4]["status"] == "404"
    assert "secret" not in running.log.read_text() and "lazy" not in running.log.read_text()


@pytest.mark.full
def test_throughput_is_logged_while_there_is_work(running: Server) -> None:
    running.complete("the lazy dog", max_tokens=5)
    pattern = r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, Running: 0 reqs, Waiting: 0 reqs, KV cache usage: [\d.]+%"
    until(lambda: re.search(pattern, running.log.read_text()) is not None, "the line on throughput", limit_s=15)


def test_pages_of_the_allowed_origin_may_call_and_others_may_not(running: Server) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = running.client.options(running.url + "/v1/completions", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    refused = running.client.options(running.url + "/v1/completions", headers={**asked, "Origin": "https://other.example"})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    answer = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_without_allowed_origins_no_page_may_call(shared: Server) -> None:
    answer = shared.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": ORIGIN})
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]


def test_unknown_fields_are_ignored_and_named_in_a_header(shared: Server) -> None:
    client = openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0)
    plain = {"model": "tiny", "prompt": "a", "max_tokens": 1, "seed": 1}
    first = client.completions.with_raw_response.create(**plain)
    assert "x-tandem-warning" not in first.headers
    second = client.completions.with_raw_response.create(**plain, user="me", extra_body={"repetition_penalti": 1.2, "sufix\nX-Evil: 1": 3, "best": None})
    assert second.headers["x-tandem-warning"] == "ignored: unknown fields 'user', 'repetition_penalti', 'sufix?X-Evil: 1'"
    assert second.parse().choices == first.parse().choices
    messages = [{"role": "user", "content": "hi", "name": "me"}]
    body = {"messages": messages, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True, "x": 1}}
    assert shared.post("/v1/chat/completions", body).headers["x-tandem-warning"] == "ignored: unknown field 'stream_options.x'"
    body = {"prompt": "a", "sampling_params": {"max_tokens": 1, "min_tokns": 1}}
    assert shared.post("/generate", body).headers["x-tandem-warning"] == "ignored: unknown field 'sampling_params.min_tokns'"
    many = shared.post("/v1/completions", {**plain, **{f"{'x' * 100}{i}": i for i in range(3000)}}).headers["x-tandem-warning"]
    assert len(many) < 2000 and many.endswith("and 2980 more")


def test_what_a_request_does_not_give_comes_from_the_generation_config(running: Server, llm: LLM) -> None:
    assert "are sampled with temperature 0, repetition_penalty 1.2, top_k 7" in running.log.read_text()
    (expected,) = llm.generate("the lazy dog", SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=12), use_tqdm=False)
    assert running.complete("the lazy dog", max_tokens=12)["choices"][0]["text"] == expected.outputs[0].text
    (expected,) = llm.generate("the lazy dog", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert running.complete("the lazy dog", max_tokens=12, repetition_penalty=1.0)["choices"][0]["text"] == expected.outputs[0].text


def test_the_servers_chat_template_replaces_the_tokenizers(running: Server) -> None:
    found = running.post("/tokenize", {"messages": [{"role": "user", "content": "dog"}]}).json()
    assert running.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == "<dog>"
