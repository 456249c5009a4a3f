"""Real vLLM, driven as a pod drives it: its tokens and log-probabilities against transformers, its weights bit for bit, its death."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_vllm import (
    GREEDY,
    SAMPLED,
    Engine,
    alive,
    brought,
    descendants,
    digest_of,
    engine_core,
    flip_in_memory,
    needs_vllm,
    perturbed,
    prompts,
    running,
)
from torch import Tensor

from tandem.config.lora import LoraConfig
from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.stacked_matrices import MatrixStacks
from tandem.rl.rollout.groups import InFlightGroups
from tandem.rl.rollout.traced_engine import TracedEngine
from tandem.runtime.traces.context import SpanContext
from tandem.runtime.traces.spans import SPANS
from tandem.types import DamagedWeights, EngineDied, Prompt, RunError, Sample, WeightVersion
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment

pytestmark = [pytest.mark.full, needs_vllm]
CONFIG = NewModelConfig(hidden_size=96, num_hidden_layers=2, intermediate_size=192, head_dim=32, num_attention_heads=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    create_model(CONFIG, 0, folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(model, tmp_path_factory.mktemp("vllm")) as started:
        yield started


def reference_logprobs(model: Path, tensors: dict[str, Tensor], samples: list[Sample]) -> list[Tensor]:
    """The log-probabilities [tokens, vocabulary] of transformers in float64 at the places of the completions' tokens."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    missing, unexpected = reference.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    found = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
            logits = reference(ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
            found.append(logits.log_softmax(-1))
    return found


def test_tokens_and_logprobs_are_those_of_transformers_after_each_update(engine: Engine, model: Path) -> None:
    asked = prompts(12, 99)
    for step in (0, 1):
        tensors = brought(engine, model, step, seed=step)
        samples = engine.draw(asked, GREEDY) + engine.draw(asked, SAMPLED)
        assert len(samples) == 12 + 48
        for sample, logprobs in zip(samples, reference_logprobs(model, tensors, samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
            assert sample.weight_versions == (WeightVersion(1, step),) * len(sample.token_ids)
            assert sample.text == engine.tokenizer.decode(sample.token_ids)
        for sample, logprobs in zip(samples[:12], reference_logprobs(model, tensors, samples[:12]), strict=True):
            assert (logprobs.max(1).values - logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]).max() < 1e-5


def test_a_family_whose_folder_names_norms_otherwise_has_the_logprobs_of_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    create_model(replace(CONFIG, architecture="glm4", tie_word_embeddings=False), 0, model)
    with running(model, tmp_path / "vllm") as engine:
        tensors = brought(engine, model, 0, seed=1)
        stacked = dict(MatrixStacks(read_shapes(model)).join(tensors.items()))
        assert any("post_self_attn_layernorm" in name for name in stacked)
        samples = engine.draw(prompts(8, 99), SAMPLED)
        for sample, logprobs in zip(samples, reference_logprobs(model, stacked, samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4


def test_a_request_has_the_parts_that_vllm_has_measured_in_its_trace(engine: Engine, model: Path) -> None:
    brought(engine, model, 2, seed=2)
    SPANS.take()
    groups = InFlightGroups(TracedEngine(engine.engine(), lambda: SpanContext("a" * 32, "b" * 16)))
    groups.add(0, prompts(3, 99), {**SAMPLED, "n": 2})
    assert len(groups.draw("all", lambda done, total: None)) == 6
    spans = SPANS.take()
    requests = [span for span in spans if span.name == "llm_request"]
    assert [span.parent_id for span in requests] == ["b" * 16] * 3
    for request in requests:
        queue, prefill, decode = sorted((span for span in spans if span.parent_id == request.context.span_id), key=lambda span: (span.start_ns, span.end_ns))
        assert (queue.name, prefill.name, decode.name) == ("queue", "prefill", "decode")
        assert request.start_ns == queue.start_ns <= queue.end_ns == prefill.start_ns < prefill.end_ns == decode.start_ns < decode.end_ns == request.end_ns
        # Eleven tokens follow the first of twelve.
        assert decode.end_ns - decode.start_ns > prefill.end_ns - prefill.start_ns and request.attributes["gen_ai.latency.time_in_model_prefill"] > 0


def test_first_tokens_have_the_distribution_of_the_model_and_seeds_decide_them(engine: Engine, model: Path) -> None:
    tensors = brought(engine, model, 10, seed=10)
    prompt, settings = prompts(1, 99), {**SAMPLED, "n": 1000, "max_tokens": 1}
    samples = engine.draw(prompt, settings)
    (logprobs,) = reference_logprobs(model, tensors, samples[:1])
    expected = logprobs[0].exp() * len(samples)
    counts = Counter(sample.token_ids[0] for sample in samples)
    found = torch.tensor([counts[token] for token in range(len(expected))], dtype=torch.float64)
    likely = expected >= 5
    bins = torch.cat([expected[likely], expected[~likely].sum()[None]]), torch.cat([found[likely], found[~likely].sum()[None]])
    chi_square = ((bins[1] - bins[0]) ** 2 / bins[0]).sum().item()
    degrees = len(bins[0]) - 1
    # Wilson and Hilferty's normal approximation of chi-square; 4.0 standard deviations. Seeds are fixed, so this passes always or never.
    assert ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5 < 4.0
    few = {**SAMPLED, "n": 16}
    first, again, other = engine.draw(prompt, few), engine.draw(prompt, few), engine.draw(prompt, {**few, "seed": 1})
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in again] != [sample.token_ids for sample in other]
    assert [sample.index for sample in first] == list(range(16)) and len({sample.token_ids for sample in first}) > 8


def filtered(logprobs: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The log-probabilities [tokens, vocabulary] that are sampled from, by the definitions of Holtzman et al. (2020) and Nguyen et al. (2024), one after the
    other: those below ``min_p`` times the largest are left out, then all but the ``top_k`` largest, then the tail beyond ``top_p`` of the rest."""
    logits = logprobs / temperature
    probabilities = logits.softmax(-1)
    logits = logits.masked_fill(probabilities < min_p * probabilities.max(-1, keepdim=True).values, -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    ordered, places = logits.softmax(-1).sort(descending=True)
    beyond = (ordered.cumsum(-1) - ordered >= top_p).gather(1, places.argsort())
    return logits.masked_fill(beyond, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("settings", [
    {"temperature": 0.6}, {"temperature": 1.5}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
])  # fmt: skip
def test_both_logprobs_at_other_temperatures_and_with_filters_are_those_of_transformers(settings: dict[str, float], engine: Engine, model: Path) -> None:
    tensors = brought(engine, model, 15, seed=15)
    samples = engine.draw(prompts(12, 99), {**SAMPLED, **settings})
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    left_out = 0
    for sample, logprobs in zip(samples, reference_logprobs(model, tensors, samples), strict=True):
        at = lambda values, sample=sample: values.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert (torch.tensor(sample.logprobs, dtype=torch.float64) - at(logprobs)).abs().max() < 1e-4
        sampling = filtered(logprobs, **every)
        left_out += int(sampling.isinf().sum())
        difference = (torch.tensor(sample.sampling_logprobs, dtype=torch.float64) - at(sampling)).abs()
        assert difference.max() < 2e-4, "a token of the tail was drawn, or its distribution is another"
        assert sample.logprobs != sample.sampling_logprobs
    assert (left_out > 0) == (settings.keys() != {"temperature"})


def test_samples_end_at_the_end_token_a_stop_text_and_the_limit(engine: Engine, model: Path) -> None:
    brought(engine, model, 20, seed=20)
    asked = prompts(8, 99, seed=5)
    samples = engine.draw(asked, {**SAMPLED, "n": 16, "max_tokens": 30})
    (end,) = engine.tokenizer.eos_token_ids
    ended = [sample for sample in samples if sample.finish_reason == "stop"]
    assert ended and all(sample.token_ids[-1] == end and end not in sample.token_ids[:-1] for sample in ended)
    assert all(len(sample.token_ids) == 30 and end not in sample.token_ids for sample in samples if sample.finish_reason == "length")
    # The same seeds with a stop text: each sample is cut where its own text had it first.
    stop = max("abcdefghij", key=lambda letter: sum(letter in sample.text for sample in samples))
    for sample, cut in zip(samples, engine.draw(asked, {**SAMPLED, "n": 16, "max_tokens": 30, "stop": [stop]}), strict=True):
        assert cut.text == sample.text.partition(stop)[0]
        assert (cut.finish_reason == "stop") == (stop in sample.text or sample.finish_reason == "stop")
    long = Prompt("long", "", tuple(range(3, 63)))
    assert [len(sample.token_ids) for sample in engine.draw([long], {**GREEDY, "max_tokens": 30})] in ([4], [3], [2], [1])


def test_a_completion_that_repeats_itself_ends_at_the_token_that_completes_the_repetition(engine: Engine, model: Path) -> None:
    brought(engine, model, 22, seed=22)
    asked, detection = prompts(16, 99, seed=7), {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}

    def repeats_at(tokens: tuple[int, ...]) -> int | None:
        for end in range(1, len(tokens) + 1):
            for size in range(1, 5):
                if end >= 3 * size and tokens[end - 3 * size : end] == tokens[end - size : end] * 3:
                    return end
        return None

    greedy = {**GREEDY, "max_tokens": 40}
    ends = dict[str, int]()
    for whole, cut in zip(engine.draw(asked, greedy), engine.draw(asked, {**greedy, "repetition_detection": detection}), strict=True):
        at = repeats_at(whole.token_ids)
        assert cut.token_ids == whole.token_ids[:at]
        is_early = at is not None and at < len(whole.token_ids)
        assert cut.finish_reason == ("repetition" if is_early else whole.finish_reason)
        assert len(cut.logprobs) == len(cut.token_ids)
        ends[cut.finish_reason] = ends.get(cut.finish_reason, 0) + 1
    assert ends.get("repetition", 0) >= 3, f"{ends}: hardly a completion repeats itself, so that this test says nothing"


def test_unfinished_completions_are_continued_by_newer_weights(engine: Engine, model: Path) -> None:
    asked, settings = prompts(8, 99, seed=6), {**SAMPLED, "budget_tokens": 5}
    old = brought(engine, model, 25, seed=25)
    begun = engine.draw(asked, settings)
    unfinished = [sample for sample in begun if sample.finish_reason == "abort"]
    assert len(unfinished) > 16 and all(len(sample.token_ids) == 5 for sample in unfinished)
    new = brought(engine, model, 26, seed=26)
    continued = engine.draw([prompt for prompt in asked if prompt.id in {sample.prompt_id for sample in unfinished}], settings, 1, unfinished)
    before = {sample.id: sample for sample in unfinished}
    assert {sample.id for sample in continued} == before.keys()
    references = [reference_logprobs(model, tensors, continued) for tensors in (old, new)]
    for sample, by_old, by_new in zip(continued, *references, strict=True):
        assert sample.token_ids[:5] == before[sample.id].token_ids and 5 < len(sample.token_ids) <= 10
        assert sample.weight_versions == (WeightVersion(1, 25),) * 5 + (WeightVersion(1, 26),) * (len(sample.token_ids) - 5)
        chosen = torch.cat([by_old[:5], by_new[5:]]).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
        assert sample.text == engine.tokenizer.decode(sample.token_ids)


def test_what_vllm_computes_with_is_what_was_published_bit_for_bit(engine: Engine, model: Path) -> None:
    tensors = brought(engine, model, 30, seed=30)
    (held,) = engine.server.held_digests()
    padded = torch.zeros(128, tensors["model.embed_tokens.weight"].shape[1])
    padded[:99] = tensors["model.embed_tokens.weight"]
    expected = {name: digest_of(tensor) for name, tensor in tensors.items()}
    expected |= {"model.embed_tokens.weight": digest_of(padded), "lm_head.weight (packed)": digest_of(padded)}
    assert {name: digest for name, digest in held.items() if name.rpartition(".")[2] in ("weight", "weight (packed)")} == expected
    engine.server.check_held()


def test_a_bit_flipped_in_shared_memory_is_named_and_nothing_of_the_update_is_applied(engine: Engine, model: Path) -> None:
    brought(engine, model, 40, seed=40)
    before, asked = engine.server.held_digests(), prompts(4, 99)
    drawn = engine.draw(asked, GREEDY)
    engine.publish(perturbed(dict(read_tensors(model)), 41), WeightVersion(1, 41))
    published = current(engine.writer.store)
    assert published is not None
    tensor = published[0].tensors[5]
    with Segment.open(tensor.segment, writable=True) as segment:
        segment.memory[tensor.offset_bytes + 7] ^= 4
    with pytest.raises(DamagedWeights, match=tensor.name):
        engine.server.update(WeightVersion(1, 41))
    assert engine.server.version == WeightVersion(1, 40) and engine.server.held_digests() == before
    assert [sample.token_ids for sample in engine.draw(asked, GREEDY)] == [sample.token_ids for sample in drawn]
    with Segment.open(tensor.segment, writable=True) as segment:
        segment.memory[tensor.offset_bytes + 7] ^= 4
    assert engine.server.update(WeightVersion(1, 41)).rereads == ()
    with pytest.raises(RunError, match=r"step 99 .* requested, but of step 41"):
        engine.server.update(WeightVersion(1, 99))


def test_a_bit_flipped_in_vllms_memory_is_named_and_the_next_update_repairs_it(engine: Engine, model: Path) -> None:
    cases = {
        "model.layers.1.input_layernorm.weight": lambda tensor: tensor[:8],
        "model.embed_tokens.weight": lambda tensor: tensor[7, :8],
        # Packed: neighbours are the outputs of the same input, which no other copy has.
        "model.layers.0.self_attn.q_proj.weight": lambda tensor: tensor[:8, 3],
        "model.layers.1.mlp.up_proj.weight": lambda tensor: tensor[:8, 5],
        "model.layers.1.mlp.down_proj.weight": lambda tensor: tensor[:8, 5],
        "lm_head.weight (packed)": lambda tensor: tensor[:8, 4],
    }
    for step, (name, part) in enumerate(cases.items(), 50):
        tensors = brought(engine, model, step, seed=step)
        tensor = tensors[name] if name in tensors else tensors["model.embed_tokens.weight"]
        assert flip_in_memory([engine_core(engine)], part(tensor).tolist()) > 0, f"{name}: not found in vLLM's memory"
        with pytest.raises(EngineDied) as raised:
            engine.server.check_held()
        assert f"'{name}'" in str(raised.value)
    brought(engine, model, 60, seed=60)
    engine.server.check_held()


def test_an_untied_model_in_16_bits_is_held_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "untied"
    create_model(NewModelConfig(architecture="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, tie_word_embeddings=False), 1, folder)
    tensors = {name: tensor.bfloat16() for name, tensor in perturbed(dict(read_tensors(folder)), 1, 0.1).items()}
    with running(folder, tmp_path / "vllm", dtype="bfloat16") as engine:
        engine.publish(tensors, WeightVersion(2, 7))
        engine.server.update(WeightVersion(2, 7))
        (held,) = engine.server.held_digests()
        for name in ("model.layers.1.mlp.gate_proj.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"):
            assert held[name] == digest_of(tensors[name])
        assert held["lm_head.weight"] == held["lm_head.weight (packed)"] != held["model.embed_tokens.weight"]
        samples = engine.draw(prompts(4, 99), SAMPLED)
        for sample, logprobs in zip(samples, reference_logprobs(folder, tensors, samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 0.1


def test_weights_in_fp32_are_rounded_once_for_an_engine_in_16_bits(model: Path, tmp_path: Path) -> None:
    tensors = perturbed(dict(read_tensors(model)), 3)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    with running(model, tmp_path / "vllm", dtype="bfloat16") as engine:
        engine.publish(tensors, WeightVersion(1, 0))
        engine.server.update(WeightVersion(1, 0))
        (held,) = engine.server.held_digests()
        assert all(held[name] == digest_of(tensor) for name, tensor in rounded.items() if "embed" not in name)
        samples = engine.draw(prompts(8, 99), SAMPLED)
    # As far as 16 bits go it is the rounded network, and the step from that to fp32 is as large.
    for weights in (rounded, tensors):
        for sample, logprobs in zip(samples, reference_logprobs(model, weights, samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().mean() < 0.05


def test_an_adapter_is_added_to_the_weights_of_the_folder(model: Path, tmp_path: Path) -> None:
    base, generator = dict(read_tensors(model)), torch.Generator().manual_seed(5)
    lora = LoraConfig(rank=3, alpha=12.0, target_modules=("q_proj", "down_proj"))
    adapted = [name.removesuffix(".weight") for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))]
    with running(model, tmp_path / "vllm", lora=lora) as engine:
        for step in (0, 1):
            adapter, whole = {}, {name: tensor.double() for name, tensor in base.items()}
            for name in adapted:
                rows, columns = base[f"{name}.weight"].shape
                a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((3, columns), (rows, 3)))
                adapter |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
                whole[f"{name}.weight"] = whole[f"{name}.weight"] + 4.0 * b.double() @ a.double()
            engine.publish(adapter, WeightVersion(1, step))
            engine.server.update(WeightVersion(1, step))
            (held,) = engine.server.held_digests()
            assert all(held[name] == digest_of(base[name]) for name in base if name.removesuffix(".weight") not in adapted and "embed" not in name)
            samples = engine.draw(prompts(6, 99), SAMPLED)
            for sample, logprobs in zip(samples, reference_logprobs(model, whole, samples), strict=True):
                chosen = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
                assert (torch.tensor(sample.logprobs, dtype=torch.float64) - chosen).abs().max() < 2e-4


def test_the_death_of_any_process_of_vllm_is_seen_and_leaves_none_behind(model: Path, tmp_path: Path) -> None:
    for number, victim in enumerate(("EngineCore", "serve")):
        with running(model, tmp_path / str(number)) as engine:
            processes = engine.processes()
            engine.publish(dict(read_tensors(model)), WeightVersion(1, 0))
            engine.server.update(WeightVersion(1, 0))
            os.kill(next(pid for pid, line in processes.items() if victim in line), signal.SIGKILL)
            # A control call: vLLM's server itself leaves it without an answer when its engine is dead.
            with pytest.raises(EngineDied):
                engine.server.update(WeightVersion(1, 1))
            with pytest.raises(EngineDied):
                engine.draw(prompts(2, 99), GREEDY)
        assert gone(list(processes)) == []


def test_vllm_ends_with_the_process_that_started_it(model: Path, tmp_path: Path) -> None:
    code = (
        f"import sys, time; sys.path += {sys.path!r}\nfrom pathlib import Path\nfrom real_vllm import running\n"
        f"with running(Path({str(model)!r}), Path({str(tmp_path)!r})):\n    print('up', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        processes = descendants(owner.pid)
        assert sum("vllm" in line.lower() for line in processes.values()) >= 2
        owner.kill()
    assert gone(list(processes)) == []


def test_a_model_that_vllm_does_not_take_is_one_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes().replace(b"Qwen3ForCausalLM", b"NoSuchModelForLM").replace(b'"qwen3"', b'"nosuchm"'))
    with pytest.raises(RunError) as raised, running(folder, tmp_path / "vllm"):
        pass
    assert str(raised.value).startswith("vLLM did not start (exit status 1): ") and "\n" not in str(raised.value) and "nosuchm" in str(raised.value).lower()


def gone(pids: list[int], patience_s: float = 30.0) -> list[int]:
    """Returns those of ``pids`` that still run when the kernel had time to deliver its signals."""
    ends = time.monotonic() + patience_s
    while (left := alive(pids)) and time.monotonic() < ends:
        time.sleep(0.1)
    return left
