"""Plans for other GPUs beside the plan that was asked for: the changes, the front of time, cost and memory, and what is refused."""

import json
import shlex

import pytest

from tandem.cli.main import main
from tandem.estimate.hardware.load import load_hardware
from tandem.layout.shapes import ModelShapes
from tandem.planner.request import PlanRequest
from tandem.planner.score import Score
from tandem.planner.search import pareto_front, sweep
from tandem.planner.what_if import bandwidth, changed

SHAPES = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, tie_word_embeddings=False)
REQUEST = PlanRequest(SHAPES, load_hardware("H100-80GB"), 16, 4096, 64, micro_batch=1, recompute="none")
SIZES = shlex.split(
    "--hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 4096 --global-batch 64 --gpus 16 --micro-batch 1 --recompute none"
)


def beats(one: Score, other: Score) -> bool:
    """Returns whether ``one`` is nowhere worse, and somewhere better."""
    figures = [(each.step_seconds, each.dollars_per_billion_tokens, each.memory.total) for each in (one, other)]
    return figures[0] != figures[1] and all(a <= b for a, b in zip(*figures, strict=True))


def test_the_front_has_all_layouts_that_no_other_beats_in_time_cost_and_memory() -> None:
    scored = [*sweep(REQUEST).scored, *sweep(changed(REQUEST, "gpus=8")).scored, *sweep(changed(REQUEST, "gpu=B200,price=9.9")).scored]
    front = list(pareto_front(scored))
    expected = {id(each) for each in scored if not any(beats(other, each) for other in scored)}
    # Of two layouts with the same figures the first is kept.
    assert {id(each) for each in front} <= expected and all(any(not beats(each, kept) for kept in front) for each in front)
    figures = {(each.step_seconds, each.dollars_per_billion_tokens, each.memory.total) for each in front}
    assert figures == {(e.step_seconds, e.dollars_per_billion_tokens, e.memory.total) for e in scored if id(e) in expected}
    # Three kinds of GPUs: the fastest, the cheapest and the smallest are not one layout, so that cost decides too.
    assert len({each.hardware.price_per_hour for each in front}) > 1


def test_what_if_stands_side_by_side_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--what-if", "gpu=B200", "--what-if", "interconnect=25Gb/s", "--what-if", "gpus=1", "--price", "2"]
    assert main(["plan", *SIZES, *asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    by_changes = {each["changes"]: each for each in answer["what_if"]}
    assert list(by_changes) == ["gpu=B200", "interconnect=25Gb/s", "gpus=1"]
    assert answer["dollars_per_billion_tokens"] == pytest.approx(2 / 3600 / answer["tokens_per_s_per_gpu"] * 1e9)
    assert by_changes["gpu=B200"]["step_ratio"] < 0.7 and by_changes["gpu=B200"]["gpu"] == "B200"
    # A layout for slow links may communicate less, but is not faster.
    assert by_changes["interconnect=25Gb/s"]["step_ratio"] >= 1
    assert by_changes["gpus=1"] == {"changes": "gpus=1", "considered": by_changes["gpus=1"]["considered"], "fits": False}
    assert {each["changes"] for each in answer["front"]} > {"gpu=B200"}
    assert main(["plan", *SIZES, *asked]) == 0
    text = capsys.readouterr().out
    assert "what if:" in text and "none fits" in text and "front of time, cost and memory of all of them:" in text


def test_a_given_layout_is_scored_on_the_other_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--dp", "16", "--zero", "3", "--json", "--what-if", "link=50GB/s,interconnect=5GB/s"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (other,) = answer["what_if"]
    assert other["layout"] == answer["layout"] and other["step_ratio"] > 1.5
    assert other["step_seconds"] == pytest.approx(other["step_ratio"] * answer["step_seconds"])
    assert main(["plan", *SIZES, "--dp", "16", "--what-if", "gpus=8"]) != 0
    assert "another number of GPUs needs another layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ("gpu=H10-80GB", "GPU 'H10-80GB' is unknown; did you mean 'H100-80GB'?"),
        ("gpus=0", "--what-if gpus=0: --gpus is 0; it must be from 1 to 1,000,000"),
        ("gpus=many", "gpus is 'many'; it must be a whole number"),
        ("interconnect=fast", "interconnect is 'fast'; it must be a bandwidth of one GPU in one direction, such as 400Gb/s or 50GB/s"),
        ("interconnect=0Gb/s", "interconnect is '0Gb/s'"),
        ("price=-1", "price is '-1'; it must be the US dollars of an hour of one GPU"),
        ("colour=red", "'colour=red' must be one of gpu=..., gpus=..., interconnect=..., link=..., price=..."),
        ("gpus=8,gpus=9", "gpus is given twice"),
    ),
    ids=("gpu", "no-gpus", "words", "no-bandwidth", "zero", "price", "key", "twice"),
)  # fmt: skip
def test_a_change_that_no_machine_has_is_refused_in_one_line(changes: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--what-if", changes]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_bandwidths_are_read_in_bits_and_bytes() -> None:
    assert [bandwidth(text, "x") for text in ("400Gb/s", "50GB/s", "1.8TB/s", "5e10B/s")] == [5e10, 5e10, 1.8e12, 5e10]
