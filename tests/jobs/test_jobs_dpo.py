"""DPO on preference pairs: the curve is that of a plain loop over transformers' model with the published loss, and a run that died, also in the
reference's pass, or is divided between ranks has the same results."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from byte_model import write_byte_model
from data_runs import command, rows, write_sections
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config.recipe import load_config
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.jobs.data_run import reference_pass
from tandem.jobs.data_run.reference_pass import ReferencePass
from tandem.jobs.replay.replay_step import replay
from tandem.jobs.start import dry_run, resume, train
from tandem.runtime.callback import Callback
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, UserError

STEPS, BETA = 10, 0.3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f"{i + i}", "rejected": f"{i}" * (1 + i % 3)} for i in range(1, 9)]
HELD_OUT = [{"prompt": "9+9=", "chosen": "18", "rejected": "99"}, {"prompt": "7+1=", "chosen": "8", "rejected": "71"}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, a dataset of eight pairs in several shards, a held-out one, and one of examples."""
    folder = tmp_path_factory.mktemp("data")
    write_byte_model(folder / "model", TEMPLATE)
    pairs, examples = DocumentFormat(suffixes=(), pairs=True), DocumentFormat(suffixes=(), examples=True)
    written = (("pairs", PAIRS, pairs), ("held-out", HELD_OUT, pairs), ("examples", [{"prompt": "a", "completion": "b"}], examples))
    for name, lines, form in written:
        (folder / "source" / name).mkdir(parents=True)
        (folder / "source" / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        tokenize(TokenizeSettings(str(folder / "source" / name), str(folder / name), str(folder / "model"), form, unit_bytes=200, workers=1))
    return folder


def write_recipe(folder: Path, data: Path, /, **changed: Any) -> Path:
    sections: dict[str, Any] = {
        "algorithm": {"name": "dpo", "beta": BETA},
        "model": {"path": str(data / "model")},
        # Every step takes all pairs, so their order does not matter.
        "data": {"train": [{"path": str(data / "pairs")}], "held_out": str(data / "held-out"), "sequence_length": 24, "global_batch_size": len(PAIRS)},
        "trainer": {"learning_rate": 1.0e-3, "warmup_steps": 2, "weight_decay": 0.1, "micro_batch_tokens": 40},
        "evaluation": {"every_steps": 5},
        "checkpoint": {"every_steps": 4, "keep": 2, "asynchronous": False},
        "run": {"max_steps": STEPS, "seed": 3, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    return write_sections(folder, sections, changed)


class Heard(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    found = train(load_config(write_recipe(folder, data)), progress=False)
    assert "10 steps: held-out loss" in found.summary() and "accuracy of pairs" in found.summary() and "--prompt" in found.summary()
    return folder / "run"


@pytest.fixture(scope="module")
def sharing(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, in which what the answers of a pair begin with is computed once."""
    folder = tmp_path_factory.mktemp("sharing")
    train(load_config(write_recipe(folder, data, trainer={"share_prompts": True})), progress=False)
    return folder / "run"


def answers(model: Any, data: Path, lines: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summed log-probabilities of the chosen and of the rejected answers, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(data / "model")

    def summed(prompt: str, answer: str) -> torch.Tensor:
        asked = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([[*asked, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
        logprobs = F.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        return logprobs[len(asked) - 1 :].sum()

    return tuple(torch.stack([summed(row["prompt"], row[side]) for row in lines]) for side in ("chosen", "rejected"))  # type: ignore[return-value]


def plain_model(data: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(data / "model", dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("kind", ["undisturbed", "sharing"])
def test_curve_is_that_of_a_plain_loop_over_transformers_and_the_published_loss(kind: str, data: Path, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    model, found = plain_model(data), rows(run)
    with torch.no_grad():
        reference = answers(model, data, PAIRS)
        reference_held_out = answers(model, data, HELD_OUT)
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decayed], "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in range(STEPS):
        optimizer.zero_grad()
        chosen, rejected = (BETA * (ours - theirs) for ours, theirs in zip(answers(model, data, PAIRS), reference, strict=True))
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 2)
        optimizer.step()
        wanted = {
            "train/loss": loss, "rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean(), "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).float().mean(),
        }  # fmt: skip
        # In the first step every reward is 0 but for rounding, so which is larger is chance.
        skipped = "rewards/accuracies" if step == 0 else ""
        assert all(abs(found[step][name] - value.item()) < 2e-5 for name, value in wanted.items() if name != skipped), step
        assert found[step]["train/examples"] == (step + 1) * len(PAIRS)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6) and found[-1]["train/loss"] < 0.5, "it learns, so equal curves mean something"
    with torch.no_grad():
        chosen, rejected = (BETA * (ours - theirs) for ours, theirs in zip(answers(model, data, HELD_OUT), reference_held_out, strict=True))
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        measured = {step: result for step, kind, result in journal.evaluations() if kind == "held_out_pairs"}
    assert list(measured) == [0, 5, STEPS] and measured[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert measured[STEPS]["loss"] == pytest.approx(-F.logsigmoid(chosen - rejected).mean().item(), abs=2e-5)
    assert measured[STEPS]["accuracy"] == (chosen > rejected).float().mean().item() and measured[STEPS]["pairs"] == 2


def test_a_shared_prompt_changes_no_bit_of_a_log_probability(undisturbed: Path, sharing: Path) -> None:
    one, other = rows(undisturbed)[0], rows(sharing)[0]
    names = ("train/loss", "logps/chosen", "logps/rejected", "train/learned_tokens")
    # Pairs are packed in another way, so that means are sums in another order.
    assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-14)
    (comparison,) = replay(sharing, STEPS - 1)
    assert not comparison.differences and comparison.count > 8


def is_same_run(run: Path, other: Path) -> bool:
    names = ["model/model.safetensors", f"checkpoints/step-{STEPS}/rank-00000.safetensors"]
    names += [str(path.relative_to(other)) for path in sorted((other / "reference").rglob("*.float32"))]
    assert len(names) > 4
    return rows(run) == rows(other) and all((run / name).read_bytes() == (other / name).read_bytes() for name in names)


class Crash(BaseException):
    """No ``Exception``, so that the run ends at once: after one of a callback it would be saved."""


class Crashing(Callback):
    def row(self, row: Any) -> None:
        if row["step"] == 6:
            raise Crash


def test_run_that_died_in_the_references_pass_and_again_in_a_step_goes_on_to_the_same_bits(
    undisturbed: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = ReferencePass._write, list[str]()

    def write_two(self: ReferencePass, name: str, content: bytes) -> None:
        if len(written) == 2:
            raise Crash
        written.append(name)
        write(self, name, content)

    monkeypatch.setattr(reference_pass.ReferencePass, "_write", write_two)
    with pytest.raises(Crash):
        train(load_config(write_recipe(tmp_path, data)), progress=False)
    monkeypatch.setattr(reference_pass.ReferencePass, "_write", lambda self, name, content: written.append(name) or write(self, name, content))
    with pytest.raises(Crash):
        resume(tmp_path / "run", callbacks=[Crashing()], progress=False)
    resume(tmp_path / "run", progress=False)
    assert is_same_run(tmp_path / "run", undisturbed)
    assert len(written) == len(set(written)) == len(list((undisturbed / "reference").rglob("*.float32"))), "no file is computed twice"


def test_damaged_reference_is_found_and_computed_again_to_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    command("verify", str(run))
    damaged = sorted((run / "reference").rglob("*.float32"))[1]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = command("verify", str(run), status=1)
    assert f"{damaged.name}' does not have the digest it was written with" in said and "a resume computes it again" in said
    with pytest.raises(RunError, match="is not as it was written; resume the run, which computes it again, then replay"):
        replay(run, STEPS - 1)
    resume(run, progress=False, overrides=["run.max_steps=11"])
    assert damaged.read_bytes() == content and len(rows(run)) == 11


def test_replayed_step_has_the_recorded_bits(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (undisturbed / "reference").rglob("*")}
    (comparison,) = replay(undisturbed, STEPS - 1)
    assert not comparison.differences and comparison.count > 8
    assert before == {path: path.stat().st_mtime_ns for path in (undisturbed / "reference").rglob("*")}


def same_curve(run: Path, undisturbed: Path) -> bool:
    names = ("train/loss", "actor/grad_norm", "rewards/margins", "rewards/chosen")
    return all(math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=2e-6) for a, b in zip(rows(run), rows(undisturbed), strict=True) for name in names)


@pytest.mark.full
def test_two_data_parallel_ranks_have_the_curve_of_one_process(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    train(load_config(write_recipe(tmp_path, data), ["--parallel.data=2", "--parallel.zero=1"]), progress=False)
    assert same_curve(tmp_path / "run", undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", ["--parallel.pipeline=2 --parallel.data=2", "--parallel.tensor=2 --parallel.context=2", "--parallel.data=3 --parallel.zero=3"]
)
@pytest.mark.parametrize("point", ["rank1:before:forward:7", "rank1:before:reference:0"])
def test_every_mesh_has_the_curve_of_one_process_though_a_rank_is_killed(mesh: str, point: str, undisturbed: Path, data: Path, tmp_path: Path) -> None:
    train(load_config(write_recipe(tmp_path, data), mesh.split()), progress=False, faults=FaultPlan.parse(point))
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        assert [event.detail["ranks"] for event in journal.events() if event.kind == "recovery"] == [[1]]
    assert same_curve(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": {"train": [{"path": "{data}/examples"}]}}, "has no preference pairs, and algorithm.name is 'dpo'; make it with 'tandem tokenize --pairs'"),
        ({"algorithm": {"name": "sft", "beta": 0.1}}, "has preference pairs, and algorithm.name is 'sft'"),
        ({"algorithm": {"name": "sft"}}, "'algorithm.beta' is 0.3, which is not read: algorithm.name is 'sft'; set algorithm.name to dpo"),
        ({"data": {"sequence_length": 7}}, "has pairs of more than data.sequence_length (7) tokens (3 of 8), the longest 8"),
        ({"algorithm": {"beta": 0}}, "'algorithm.beta' is 0.0; it must be above 0"),
        ({"algorithm": {"label_smoothing": 0.5}}, "'algorithm.label_smoothing' is 0.5, the share of the pairs"),
        ({"algorithm": {"loss_type": "ipo", "label_smoothing": 0.1}}, "'algorithm.label_smoothing' is 0.1, which is not read: algorithm.loss_type is 'ipo'"),
        ({"algorithm": {"loss_type": "kto"}}, "'algorithm.loss_type' is 'kto'; it must be one of sigmoid, ipo, hinge, robust"),
        ({"task": {"name": "sort"}, "data": {"train": [], "held_out": ""}}, "need algorithm.name sft"),
    ],
)  # fmt: skip
def test_recipe_that_cannot_work_is_refused_in_one_line_before_any_work(changed: dict[str, Any], said: str, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, **json.loads(json.dumps(changed).replace("{data}", str(data))))
    with pytest.raises(UserError) as caught:
        train(load_config(recipe))
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_dry_run_counts_pairs_and_predicts_the_references_pass(data: Path, tmp_path: Path) -> None:
    said = dry_run(load_config(write_recipe(tmp_path, data)), "recipe.yaml")
    assert "data: 8 pairs in 1 datasets" in said and "asked for: 80 pairs, 10.00 epochs" in said
    assert "10 steps of 384 tokens and" in said and ", reference pass " in said
