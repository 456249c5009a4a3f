"""Training of a reward model: the curve is that of a plain loop over transformers' model with TRL's loss, and a run that died or is divided between ranks
has the same results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from byte_model import write_byte_model
from data_runs import command, rows, write_sections
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.recipe import load_config, recipe_of
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.jobs.replay.replay_step import replay
from tandem.jobs.start import dry_run, resume, train
from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model
from tandem.runtime.callback import Callback
from tandem.trainer.losses.reward_model import preference_loss
from tandem.types import UserError

STEPS, CENTER = 8, 0.05
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": f"{i + i}", "rejected": f"{i}" * (1 + i % 3), "margin": i / 8} for i in range(1, 9)]
HELD_OUT = [{"prompt": "9+9=", "chosen": "18", "rejected": "99", "margin": 0.5}, {"prompt": "7+1=", "chosen": "8", "rejected": "71", "margin": 0}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a language model, a dataset of eight pairs with margins in several shards, and a held-out one."""
    folder = tmp_path_factory.mktemp("data")
    write_byte_model(folder / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    form = DocumentFormat(suffixes=(), pairs=True, margin_key="margin")
    for name, lines in (("pairs", PAIRS), ("held-out", HELD_OUT)):
        (folder / "source" / name).mkdir(parents=True)
        (folder / "source" / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        tokenize(TokenizeSettings(str(folder / "source" / name), str(folder / name), str(folder / "model"), form, unit_bytes=200, workers=1))
    return folder


def write_recipe(folder: Path, data: Path, /, **changed: Any) -> Path:
    sections: dict[str, Any] = {
        "algorithm": {"name": "reward_model", "center_coef": CENTER},
        "model": {"path": str(data / "model")},
        # Every step takes all pairs, so their order does not matter.
        "data": {"train": [{"path": str(data / "pairs")}], "held_out": str(data / "held-out"), "sequence_length": 24, "global_batch_size": len(PAIRS)},
        "trainer": {"learning_rate": 1.0e-3, "warmup_steps": 2, "weight_decay": 0.1, "micro_batch_tokens": 40},
        "evaluation": {"every_steps": 4},
        "checkpoint": {"every_steps": 4, "keep": 2, "asynchronous": False},
        "run": {"max_steps": STEPS, "seed": 3, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    return write_sections(folder, sections, changed)


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    found = train(load_config(write_recipe(folder, data)), progress=False)
    assert "accuracy of pairs" in found.summary() and "--reward_model.path=" in found.summary()
    return folder / "run"


def scores(model: Any, data: Path, lines: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scores of the chosen and of the rejected answers, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(data / "model")

    def score(prompt: str, answer: str) -> torch.Tensor:
        ids = [*tokenizer(prompt)["input_ids"], *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        return model(torch.tensor([ids])).logits[0, 0]

    return tuple(torch.stack([score(row["prompt"], row[side]) for row in lines]) for side in ("chosen", "rejected"))  # type: ignore[return-value]


def trl_loss(chosen: torch.Tensor, rejected: torch.Tensor, lines: list[dict[str, Any]]) -> torch.Tensor:
    """TRL's ``RewardTrainer`` with a margin and ``center_rewards_coefficient``."""
    margin = torch.tensor([row["margin"] for row in lines])
    return -F.logsigmoid(chosen - rejected - margin).mean() + CENTER * torch.mean((chosen + rejected) ** 2)


def test_loss_of_a_pair_worked_by_hand() -> None:
    """Scores 2 and 1 with margin 1 differ by nothing more than the margin: log 2; the centre adds 0.1 times 3 squared."""
    found = preference_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0]), 0.1)
    assert found.item() == pytest.approx(0.6931472 + 0.9)


def test_curve_is_that_of_a_plain_loop_over_transformers_and_the_loss_of_trl(undisturbed: Path, data: Path) -> None:
    start = undisturbed / "models" / "value"
    model, found = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32, attn_implementation="eager"), rows(undisturbed)
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decayed], "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in range(STEPS):
        optimizer.zero_grad()
        chosen, rejected = scores(model, data, PAIRS)
        loss = trl_loss(chosen, rejected, PAIRS)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 2)
        optimizer.step()
        wanted = {
            "train/loss": loss, "rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean(), "rewards/margins": (chosen - rejected).mean(),
            "rewards/mean": (chosen + rejected).mean() / 2, "rewards/accuracies": (chosen > rejected).float().mean(),
        }  # fmt: skip
        assert all(abs(found[step][name] - value.item()) < 2e-5 for name, value in wanted.items()), step
    assert found[-1]["rewards/accuracies"] == 1.0 and found[-1]["train/loss"] < found[0]["train/loss"]
    exported = AutoModelForSequenceClassification.from_pretrained(undisturbed / "model")
    assert exported.config.num_labels == 1
    with torch.no_grad():
        assert torch.allclose(torch.stack(scores(exported, data, HELD_OUT)), torch.stack(scores(model, data, HELD_OUT)), atol=1e-4)


class Crash(BaseException):
    """No ``Exception``, so that the run ends at once: after one of a callback it would be saved."""


class Crashing(Callback):
    def row(self, row: Any) -> None:
        if row["step"] == 6:
            raise Crash


def test_a_run_that_died_is_resumed_and_replayed_bit_for_bit(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(load_config(write_recipe(tmp_path, data)), callbacks=[Crashing()], progress=False)
    resume(tmp_path / "run", progress=False)
    assert rows(tmp_path / "run") == rows(undisturbed)
    for name in ("model/model.safetensors", f"checkpoints/step-{STEPS}/rank-00000.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()
    (compared,) = replay(tmp_path / "run", 6)
    assert not compared.differences and compared.count > 8
    command("verify", str(tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_ranks_train_the_model_of_one_process(mesh: dict[str, int], undisturbed: Path, data: Path, tmp_path: Path) -> None:
    train(load_config(write_recipe(tmp_path, data, parallel=mesh)), progress=False)
    for ours, theirs in zip(rows(tmp_path / "run"), rows(undisturbed), strict=True):
        assert all(ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5) for name in ("train/loss", "rewards/margins", "actor/grad_norm"))
    model = load_model(tmp_path / "run" / "model", select("reference"), heads="any")
    assert model.shapes.value_head == "sequence"


@pytest.mark.full
def test_a_reward_model_is_trained_further_and_takes_the_place_of_no_language_model(undisturbed: Path, data: Path, tmp_path: Path) -> None:
    trained = str(undisturbed / "model")
    assert "data: 8 pairs" in dry_run(load_config(write_recipe(tmp_path, data, model={"path": trained})), "recipe.yaml")
    with pytest.raises(UserError, match="has no language-model head"):
        dry_run(load_config(write_recipe(tmp_path, data, model={"path": trained}, algorithm={"name": "dpo", "center_coef": 0.0})), "recipe.yaml")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"name": "sft", "center_coef": 0.1}, "'algorithm.center_coef' is 0.1, which is not read: algorithm.name is 'sft'"),
        ({"name": "reward_model", "center_coef": -1}, "'algorithm.center_coef' is -1"),
        ({"name": "reward_model", "beta": 0.2}, "'algorithm.beta' is 0.2, which is not read: algorithm.name is 'reward_model'"),
    ],
)
def test_keys_that_make_no_sense_are_one_line(algorithm: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as raised:
        recipe_of({"algorithm": algorithm, "model": {"path": "model"}, "data": {"train": [{"path": "data"}]}})
    assert expected in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_pair_without_a_margin_is_refused_where_margins_are_read(data: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    form = DocumentFormat(suffixes=(), pairs=True, margin_key="margin")
    with pytest.raises(UserError, match="the margin under 'margin' is missing; it must be a number"):
        tokenize(TokenizeSettings(str(tmp_path / "source"), str(tmp_path / "out"), str(data / "model"), form, workers=1))


