"""What drives vLLM, without vLLM: weights read back from packed layers, shards, requests and answers, the socket, and what a recipe may say."""

import base64
import contextlib
import http.server
import io
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from tandem.backends.vllm import held_weights as held_weights_module
from tandem.backends.vllm.engine import VllmEngine
from tandem.backends.vllm.generate import routing_of, times_of
from tandem.backends.vllm.held_weights import PROBE_ROWS, digest, held_weights, shard_of
from tandem.backends.vllm.http_client import VllmClient
from tandem.backends.vllm.raw_logprobs import report_raw_logprobs
from tandem.config.load import to_mapping
from tandem.config.recipe import Recipe, load_config
from tandem.engine.processing.outputs import RequestTimes
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.jobs.checks import check_rl
from tandem.jobs.start import dry_run
from tandem.model.new_model import write_tokenizer
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.rl.rollout.groups import InFlightGroups
from tandem.text.tokenizer import Tokenizer
from tandem.types import EngineDied, FinishReason, Prompt, Sample, UserError, WeightVersion

SORT = Path(__file__).parents[2] / "recipes" / "sort.yaml"
VERSION = WeightVersion(3, 8)


class Packed(nn.Module):
    """A linear layer as vLLM has it on a CPU: the parameter is empty, and the matrix is in an object of the library, here blocks of 16 columns."""

    def __init__(self, weight: Tensor, sizes: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.output_partition_sizes, self.input_size_per_partition = sizes, weight.shape[1]
        self.blocks = [block.clone() for block in weight.split(16, 1)]

    def cpu_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = x.split(16, 1)
        return sum((part @ block.t() for part, block in zip(columns, self.blocks, strict=True)), torch.zeros(len(x), len(self.blocks[0]), dtype=x.dtype))


class Head(Packed):
    """A head that is packed beside the parameter that it shares with the embedding."""

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__(embedding.data, [len(embedding)])
        self.weight = embedding


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, qkv: Tensor, sizes: list[int], embedding: Tensor) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)
        self.layers = nn.ModuleList([nn.ModuleDict({"qkv_proj": Packed(qkv, sizes), "norm": nn.LayerNorm(4, bias=False)})])
        self.lm_head = Head(self.embed_tokens.weight)
        self.register_buffer("cos_sin_cache", torch.arange(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_read_back_bit_for_bit_and_a_flipped_bit_names_its_tensor(dtype: torch.dtype) -> None:
    sizes, inputs = [8, 4, 4], PROBE_ROWS + 16
    torch.manual_seed(0)
    qkv, embedding = torch.randn(16, inputs).to(dtype), torch.randn(20, 32).to(dtype)
    qkv[3, 5], qkv[4, 6] = -0.0, torch.finfo(dtype).tiny
    model = Model(qkv, sizes, embedding)
    found = {held.name: held for held in held_weights(model)}
    expected = dict(zip(("layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.0.v_proj.weight"), qkv.split(sizes), strict=True))
    expected |= {"embed_tokens.weight": embedding, "lm_head.weight (packed)": embedding}
    expected |= {"layers.0.norm.weight": torch.ones(4), "cos_sin_cache": torch.arange(3.0)}
    assert found.keys() == expected.keys()
    assert all(digest(found[name].tensor) == digest(tensor) for name, tensor in expected.items())
    assert all(torch.equal(found[name].tensor, tensor) for name, tensor in expected.items())
    assert found["lm_head.weight (packed)"].published == "embed_tokens.weight" and found["cos_sin_cache"].published == ""
    before = {name: digest(held.tensor) for name, held in found.items()}
    for block, name in ((model.layers[0]["qkv_proj"].blocks[-1][9, :1], "layers.0.k_proj.weight"), (model.lm_head.blocks[1][3, :1], "lm_head.weight (packed)")):
        bits = block.view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits ^= 1
        now = {held.name: digest(held.tensor) for held in held_weights(model)}
        assert [each for each in before if now[each] != before[each]] == [name]
        bits ^= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_read_back_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's packing changes the order of the elements of each expert's matrix, here that of the transposed one, backwards; -0.0 keeps its sign."""
    inner, hidden, count = 24, 40, 3
    monkeypatch.setattr(held_weights_module, "_packed", lambda experts, isa: experts.transpose(1, 2).flatten(1).flip(1).reshape(experts.shape))
    held_weights_module._packed_places.cache_clear()
    torch.manual_seed(0)
    gate_up, down = torch.randn(count, 2 * inner, hidden).to(dtype), torch.randn(count, hidden, inner).to(dtype)
    gate_up[1, 3, 5] = -0.0
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(held_weights_module._packed(gate_up, "vec"), requires_grad=False)
    layer.w2_weight = nn.Parameter(held_weights_module._packed(down, "vec"), requires_grad=False)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace(isa="vec")))
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleDict({"routed_experts": layer})})})
    found = {held.name: held.tensor for held in held_weights(model)}
    held_weights_module._packed_places.cache_clear()
    expected = {f"mlp.experts.{expert}.down_proj.weight": down[expert] for expert in range(count)}
    expected |= {f"mlp.experts.{expert}.gate_proj.weight": gate_up[expert, :inner] for expert in range(count)}
    expected |= {f"mlp.experts.{expert}.up_proj.weight": gate_up[expert, inner:] for expert in range(count)}
    assert found.keys() == expected.keys()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert all(torch.equal(found[name].contiguous().view(bits), tensor.contiguous().view(bits)) for name, tensor in expected.items())


def numpy_text(experts: Any) -> str:
    file = io.BytesIO()
    numpy.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_recorded_routing_is_read_from_an_answer(dtype: str) -> None:
    experts = numpy.random.default_rng(0).integers(0, 200, (9, 3, 2)).astype(dtype)
    routed = routing_of(numpy_text(experts), 9)
    assert (routed.layers, routed.experts_per_token, routed.tokens) == (3, 2, 9)
    assert numpy.array_equal(numpy.frombuffer(routed.data, dtype=f"<u{routed.item_bytes}").reshape(9, 3, 2), experts)
    for wrong in (None, "", numpy_text(experts[:8]), numpy_text(experts.astype("int64")), numpy_text(experts[0]), numpy_text(experts)[:-8]):
        with pytest.raises(EngineDied, match=r"vLLM answered with the routing .* for 9 tokens"):
            routing_of(wrong, 9)


def test_shards_are_those_of_tensor_parallel_layers() -> None:
    whole, ranks = torch.arange(96.0).view(12, 8), 4
    for rank in range(ranks):
        assert torch.equal(shard_of(whole, (3, 8), rank, ranks), whole.chunk(ranks)[rank])
        assert torch.equal(shard_of(whole, (12, 2), rank, ranks), whole.chunk(ranks, 1)[rank])
        # Two key-value heads on four ranks: ranks 0 and 1 have the first.
        assert torch.equal(shard_of(whole, (6, 8), rank, ranks), whole.chunk(2)[rank // 2])
        # A vocabulary of 12 that is padded to 16, so that the last rank has nothing but padding, and to 32.
        for size in (4, 8):
            padded = torch.cat([whole, torch.zeros(4 * size - 12, 8)])
            assert torch.equal(shard_of(whole, (size, 8), rank, ranks, is_padded=True), padded.chunk(ranks)[rank])
        assert shard_of(whole, (12, 8), rank, ranks) is whole
    assert torch.equal(shard_of(whole, (16, 8), 0, 1, is_padded=True), torch.cat([whole, torch.zeros(4, 8)]))
    for wrong in ((5, 8), (4, 8), (3, 2), (12,)):
        with pytest.raises(ValueError, match="its shape is"):
            shard_of(whole, wrong, 0, ranks)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[VllmClient, list[dict[str, Any]], dict[str, Any]]]:
    """An HTTP server on a Unix socket that answers with ``answer``: what it was asked, and what it answers."""
    asked, answer = list[dict[str, Any]](), {"status": 200, "body": {}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, **body})
            if answer["status"] == 0:
                self.connection.close()
                return
            made = answer["body"](body) if callable(answer["body"]) and self.path.endswith("generate") else {} if callable(answer["body"]) else answer["body"]
            data = made if isinstance(made, bytes) else json.dumps(made).encode()
            self.send_response(answer["status"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    path = tmp_path / "http"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as listening:
        listening.daemon_threads = True
        listening.handle_error = lambda *_: None  # type: ignore[method-assign]  # A client that has given up.
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield VllmClient(path), asked, answer
        listening.shutdown()


def test_errors_of_the_server_are_one_line_and_its_end_is_seen(server: Any, tmp_path: Path) -> None:
    client, _, answer = server
    answer.update(status=500, body={"error": {"message": "tensor 'x'\nis wrong", "code": 500}})
    with pytest.raises(EngineDied, match=r"^the server of vLLM answered /pause with 500: tensor 'x' is wrong$"):
        client.post("/pause")
    answer.update(status=503, body=b"no\n\nJSON")
    with pytest.raises(EngineDied, match=r"/pause with 503: no JSON$"):
        client.post("/pause")
    answer.update(status=0)
    for gone in (client, VllmClient(tmp_path / "nobody")):
        with pytest.raises(EngineDied, match=r"^the server of vLLM does not answer /pause: "):
            gone.post("/pause")


def generated(body: dict[str, Any], label: str = "3.8", reason: str = "length") -> dict[str, Any]:
    """An answer of ``/inference/v1/generate``: as many tokens as asked for, which name the seed."""
    params = body["sampling_params"]
    tokens = [10 + (params["seed"] + place) % 80 for place in range(params["max_tokens"])]
    # As ``report_raw_logprobs`` leaves it where two are asked for.
    both = lambda token: [{"token_id": token, "logprob": -token / 100}, {"token_id": token + 1, "logprob": -token / 50}]
    content = [{"token_id": token, "logprob": -token / 100, "top_logprobs": both(token)[: params["logprobs"]]} for token in tokens]
    spans = [{"version": label, "start": 0, "end": len(tokens)}]
    return {"choices": [{"token_ids": tokens, "finish_reason": reason, "stop_reason": None, "logprobs": {"content": content}, "weight_versions": spans}]}


# As vLLM 0.32 answers with statistics; without them each is null.
MEASURED = {
    "time_to_first_token_ms": 20.0, "generation_time_ms": 50.0, "queue_time_ms": 4.0, "mean_itl_ms": 10.0, "tokens_per_second": 85.7,
    "speculative_decoding": None,
}  # fmt: skip


def test_the_times_of_a_request_are_counted_back_from_its_answer() -> None:
    assert times_of({"metrics": MEASURED}, 100.0, 100.08) == RequestTimes(100.0, pytest.approx(100.01), pytest.approx(100.03))
    # An answer that was quicker than the parts, as measured by another clock, has none before it was asked for.
    assert times_of({"metrics": MEASURED}, 100.0, 100.04) == RequestTimes(100.0, 100.0, 100.0)
    for answer in ({}, {"metrics": None}, {"metrics": dict.fromkeys(MEASURED)}):
        assert times_of(answer, 100.0, 100.08) is None


def engine_of(client: VllmClient, tokenizer: Tokenizer, *, most: int) -> VllmEngine:
    server: Any = SimpleNamespace(client=client, version=VERSION, returns_routing=False)
    return VllmEngine(server, tokenizer, max_model_len=12, vocab_size=99, most=most)


def test_groups_are_drawn_with_a_seed_for_each_sample_and_whatever_other_weights_drew_is_refused(server: Any, tmp_path: Path) -> None:
    client, asked, answer = server
    answer["body"] = generated
    recipe = load_config(SORT)
    write_tokenizer(recipe.model.create, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    make = lambda: InFlightGroups(engine_of(client, tokenizer, most=5))
    prompts = [Prompt(f"p{i}", "", tuple(range(3, 5 + i))) for i in range(6)]
    settings = {**sampling_settings(recipe.rollout, 3, seed=1), "max_tokens": 8}
    groups, streamed, progress = make(), [], []
    groups.add(4, prompts, settings)
    samples = groups.draw("all", lambda done, total: progress.append((done, total)), streamed.extend)
    assert [sample.id for sample in samples] == [f"4/p{i}/{index}" for i in range(6) for index in range(3)]
    assert sorted(sample.id for sample in streamed) == sorted(sample.id for sample in samples) and progress[-1] == (6, 6)
    assert [len(sample.token_ids) for sample in samples[::3]] == [8, 8, 8, 7, 6, 5], "the context has 12 tokens"
    assert all(sample.logprobs == tuple(-token / 100 for token in sample.token_ids) == sample.sampling_logprobs for sample in samples)
    assert {version for sample in samples for version in sample.weight_versions} == {VERSION}
    seeds = {body["sampling_params"]["seed"] for body in asked}
    assert len(seeds) == 18 and max(seeds) < 2**32
    again = make()
    again.add(4, prompts, settings)
    assert again.draw("any", lambda done, total: None), "a group is finished"
    again.drop()
    assert {body["sampling_params"]["seed"] for body in asked[18:] if "sampling_params" in body} <= seeds, "the same request had another seed"
    wrong = {r"drew completion \d of request-0 with the weights": {"label": "3.7"}, "finish reason 'abort'": {"reason": "abort"}}
    for match, change in wrong.items():
        answer["body"] = lambda body, change=change: generated(body, **change)
        groups = make()
        groups.add(4, prompts[:1], settings)
        with pytest.raises(EngineDied, match=match):
            groups.draw("all", lambda done, total: None)
        groups.drop()


def test_a_completion_is_continued_with_its_own_tokens_other_random_numbers_and_a_stop_text_that_begins_in_them(server: Any, tmp_path: Path) -> None:
    client, asked, answer = server
    recipe = load_config(SORT)
    write_tokenizer(recipe.model.create, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    begun, rest = tokenizer.encode("31"), tokenizer.encode("2879")

    def rest_of(body: dict[str, Any]) -> dict[str, Any]:
        made = generated(body)
        made["choices"][0]["token_ids"] = rest[: body["sampling_params"]["max_tokens"]]
        return made

    answer["body"] = rest_of
    prompt, old = Prompt("p", "", (3, 4)), WeightVersion(3, 7)
    settings = {**sampling_settings(recipe.rollout, 3, seed=1), "max_tokens": 6, "budget_tokens": 4}
    sample = Sample("4/p/1", "p", 1, (3, 4), tuple(begun), (-0.5, -0.25), (-0.5, -0.25), (old, old), FinishReason.ABORT, "31")

    def drawn(stop: list[str]) -> Sample:
        groups = InFlightGroups(engine_of(client, tokenizer, most=2))
        groups.add(5, [prompt], {**settings, "stop": stop}, [sample])
        (continued,) = groups.draw("all", lambda done, total: None)
        return continued

    continued = drawn([])
    assert (continued.id, continued.text, continued.token_ids) == ("4/p/1", "312879", (*begun, *rest))
    assert continued.logprobs[:2] == (-0.5, -0.25) and len(continued.logprobs) == 6 and continued.weight_versions == (old, old, *(VERSION,) * 4)
    (first,) = asked
    assert first["token_ids"] == [3, 4, *begun] and first["sampling_params"]["max_tokens"] == 4
    whole = InFlightGroups(engine_of(client, tokenizer, most=2))
    whole.add(4, [prompt], settings)
    whole.draw("all", lambda done, total: None)
    assert first["sampling_params"]["seed"] not in {body["sampling_params"]["seed"] for body in asked[1:]}, "it was drawn with the numbers of its beginning"
    # vLLM, which sees "2879", knows nothing of "12".
    cut = drawn(["87", "12"])
    assert (cut.text, cut.finish_reason, cut.token_ids) == ("3", "stop", (*begun, rest[0]))
    assert len(cut.logprobs) == len(cut.sampling_logprobs) == len(cut.weight_versions) == 3


def test_a_repetition_that_begins_before_a_pause_ends_a_completion_at_the_token_that_completes_it(server: Any, tmp_path: Path) -> None:
    client, asked, answer = server
    recipe = load_config(SORT, ["--rollout.backend=vllm", "--rollout.repetition_detection={max_pattern_size: 2, min_count: 3}"])
    assert isinstance(recipe, Recipe)
    write_tokenizer(recipe.model.create, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    begun, prompt, old = tokenizer.encode("3131"), Prompt("p", "", (3, 4)), WeightVersion(3, 7)
    settings = {**sampling_settings(recipe.rollout, 1, seed=1), "max_tokens": 8, "budget_tokens": 4}
    sample = Sample("4/p/0", "p", 0, (3, 4), tuple(begun), (-0.5,) * 4, (-0.5,) * 4, (old,) * 4, FinishReason.ABORT, "3131")

    def drawn(text: str, reason: str) -> Sample:
        def made(body: dict[str, Any]) -> dict[str, Any]:
            tokens, whole = tokenizer.encode(text), generated(body, reason=reason)
            (choice,) = whole["choices"]
            choice["token_ids"], choice["stop_reason"] = tokens, "repetition_detected" if reason == "repetition" else None
            choice["logprobs"]["content"] = choice["logprobs"]["content"][: len(tokens)]
            choice["weight_versions"][0]["end"] = len(tokens)
            return whole

        answer["body"] = made
        groups = InFlightGroups(engine_of(client, tokenizer, most=2))
        groups.add(5, [prompt], settings, [sample])
        (continued,) = groups.draw("all", lambda done, total: None)
        return continued

    # vLLM, which sees what follows, finds one that is in it.
    for follows, reason, text in (("3128", "length", "313131"), ("2444", "repetition", "31312444"), ("2876", "length", "31312876"), ("31", "stop", "313131")):
        continued = drawn(follows, reason)
        assert (continued.text, continued.finish_reason) == (text, "repetition" if follows == "3128" else reason)
        assert len(continued.logprobs) == len(continued.weight_versions) == len(text)
    assert all(body["sampling_params"]["repetition_detection"] == {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3} for body in asked)


def test_a_request_that_is_given_up_closes_its_connection_and_has_no_output(server: Any, tmp_path: Path) -> None:
    client, asked, answer = server
    write_tokenizer(load_config(SORT).model.create, tmp_path)
    may_answer = threading.Event()

    def late(body: dict[str, Any]) -> dict[str, Any]:
        assert may_answer.wait(30)
        return generated(body)

    answer["body"] = late
    engine = engine_of(client, Tokenizer.from_folder(tmp_path), most=2)
    engine.add_request("given up", [3, 4], SamplingParams(n=3, max_tokens=4), key=1)
    while len(asked) < 2:  # The third waits for a thread.
        assert engine.step() == []
    with pytest.raises(UserError, match="request id 'given up' is in use"):
        engine.add_request("given up", [3], SamplingParams(), key=1)
    assert engine.abort("given up") and not engine.abort("given up")
    engine.add_request("kept", [3, 4], SamplingParams(max_tokens=5), key=2)
    outputs = []
    while not outputs:
        outputs = engine.step()
        # The calls given up have ended without an answer, so that there is a thread for this one.
        if any(body["sampling_params"]["max_tokens"] == 5 for body in asked):
            may_answer.set()
    assert [output.request_id for output in outputs] == ["kept"] and engine.step() == []
    for tokens, match in (([], "is empty"), ([3] * 12, "no room for a completion"), ([3, 99], "holds token id 99")):
        with pytest.raises(UserError, match=match):
            engine.add_request("refused", tokens, SamplingParams(max_tokens=1), key=3)
    engine.close()


@pytest.mark.parametrize("override", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_at_another_temperature_or_with_a_filter_both_logprobs_are_recorded(override: dict[str, float], server: Any, tmp_path: Path) -> None:
    client, asked, answer = server
    answer["body"] = generated
    recipe = load_config(SORT)
    write_tokenizer(recipe.model.create, tmp_path)
    settings = {**sampling_settings(recipe.rollout, 2, seed=1), "max_tokens": 4, **override}

    def drawn() -> list[Any]:
        groups = InFlightGroups(engine_of(client, Tokenizer.from_folder(tmp_path), most=2))
        groups.add(4, [Prompt("p", "", (3, 4))], settings)
        return groups.draw("all", lambda done, total: None)

    samples = drawn()
    assert all(sample.sampling_logprobs == tuple(-token / 100 for token in sample.token_ids) for sample in samples)
    assert all(sample.logprobs == tuple(-token / 50 for token in sample.token_ids) for sample in samples)
    params = asked[0]["sampling_params"]
    assert params["logprobs"] == 2 and all(params[name] == settings[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    answer["body"] = lambda body: generated({"sampling_params": {**body["sampling_params"], "logprobs": 1}})
    with pytest.raises(EngineDied, match="without the raw log-probabilities"):
        drawn()


class Sampling(nn.Module):
    """A sampler as vLLM's: it divides the logits in place and reports the sampled token, the likeliest ones and their processed log-probabilities."""

    def forward(self, logits: Tensor, temperature: float, most: int | None) -> SimpleNamespace:
        processed = logits.div_(temperature).log_softmax(-1)
        sampled = processed.argmin(-1, keepdim=True)
        if most is None:
            return SimpleNamespace(sampled_token_ids=sampled.int(), logprobs_tensors=None)
        ids = torch.cat([sampled, processed.topk(most).indices], 1)
        tensors = SimpleNamespace(logprob_token_ids=ids.int(), logprobs=processed.gather(1, ids))
        return SimpleNamespace(sampled_token_ids=sampled.int(), logprobs_tensors=tensors)


def test_the_sampler_reports_raw_logprobs_where_a_request_asks_for_both() -> None:
    class Patched(Sampling):
        pass

    logits, sampler = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), Patched()
    report_raw_logprobs(sampler)
    raw, scaled = logits.log_softmax(-1), (logits / 0.5).log_softmax(-1)
    found = sampler(logits.clone(), 0.5, 2)
    sampled, tensors = found.sampled_token_ids.long(), found.logprobs_tensors
    assert torch.equal(tensors.logprob_token_ids[:, :1].long(), sampled)
    assert torch.equal(tensors.logprobs, torch.cat([scaled.gather(1, sampled), raw.gather(1, sampled), raw.gather(1, sampled)], 1))
    assert (tensors.logprob_token_ids[:, 1:] != sampled).all() and tensors.logprob_token_ids.max() < 7
    alone = sampler(logits.clone(), 0.5, 0).logprobs_tensors
    assert torch.equal(alone.logprobs, scaled.gather(1, sampled)) and sampler(logits.clone(), 0.5, None).logprobs_tensors is None


def test_a_recipe_on_vllm_corrects_for_importance_and_says_so_in_its_configuration() -> None:
    recipe = load_config(SORT, ["--rollout.backend=vllm"])
    assert isinstance(recipe, Recipe) and not recipe.is_exact
    saved = to_mapping(recipe)["algorithm"]
    assert (saved["tis_cap"], saved["old_logprobs"]) == (2.0, "recompute") and recipe.rollout.verify_weights_every_steps == 1
    assert load_config(SORT, ["--rollout.backend=vllm", "--algorithm.tis_cap=5"]).algorithm.tis_cap == 5.0  # type: ignore[union-attr]
    assert load_config(SORT).algorithm.tis_cap is None  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"'rollout.backend' is 'vllm', so samples come from another distribution.*tis_cap"):
        load_config(SORT, ["--rollout.backend=vllm", "--algorithm.tis_cap=null"])


@pytest.mark.parametrize("override", [
    "rollout.temperature=0.005", "trainer.dtype=float64",
    "residents.plan=sleep", "residents.plan=offload",
    "rollout.engine.quantization=int8", "rollout.engine.kv_cache_dtype=int8", "rollout.engine.batching=static", "rollout.engine.watermark=0.2",
    "rollout.engine.speculative_config={method: ngram}", "rollout.engine.deterministic=false",
])  # fmt: skip
def test_what_vllm_is_not_driven_with_is_refused_in_one_line(override: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config(SORT, ["--rollout.backend=vllm", f"--{override}"])
    assert "'rollout.backend' is 'vllm'" in str(raised.value) and "\n" not in str(raised.value)


MIXTURE = ("model.create.architecture=qwen3_moe", "model.create.moe_intermediate_size=64")


@pytest.mark.parametrize(("overrides", "match"), [
    (("model.create.head_dim=16",), "heads of 16 values.*set rollout.backend to tandem$"),
    ((MIXTURE[0], "model.create.moe_intermediate_size=40"), "experts have matrices of 40 by .*set rollout.backend to tandem$"),
    (("trainer.router_replay=R3",), "'trainer.router_replay' is 'R3' and the model has no experts; remove the key$"),
    ((*MIXTURE, "trainer.router_bias_rate=0.001"), "'trainer.router_bias_rate' is 0.001 .* set it to 0$"),
    ((*MIXTURE, "trainer.share_prompts=true"), "'trainer.share_prompts' computes a prompt once .*; set it to false, or trainer.router_replay to disabled$"),
    ((*MIXTURE, "trainer.router_replay=R3", "rollout.engine.enable_prefix_caching=false"), "'rollout.engine.enable_prefix_caching' .* set it to true, or"),
])  # fmt: skip
def test_a_model_that_vllm_would_end_with_is_refused_before_it_starts(
    overrides: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_rl, "python_of", lambda name: Path())
    with pytest.raises(UserError, match=match), contextlib.chdir(tmp_path):
        dry_run(load_config(SORT, ["--rollout.backend=vllm", *(f"--{override}" for override in overrides)]), str(SORT))


@pytest.mark.parametrize("mode", ["R3", "disabled"])
def test_tandems_engine_has_nothing_to_replay(mode: str) -> None:
    with pytest.raises(UserError, match=f"'trainer.router_replay' is '{mode}' and rollout.backend 'tandem', .* so that there is nothing to replay"):
        load_config(SORT, [f"--trainer.router_replay={mode}"])


def test_a_dry_run_without_the_environment_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SIDECARS", str(tmp_path))
    with pytest.raises(UserError, match=r"has no environment on this machine; make it with: tandem sidecar install vllm$"), contextlib.chdir(tmp_path):
        dry_run(load_config(SORT, ["--rollout.backend=vllm"]), str(SORT))
