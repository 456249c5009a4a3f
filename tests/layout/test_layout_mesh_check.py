"""A mesh that does not divide a model is refused in one line, before any process starts."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.mesh_check import check_layout
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError

DENSE = ModelShapes("qwen3", 43, 36, 3, 4, 2, 16, 50, 128, True, qk_norm=True)
HYBRID = replace(DENSE, architecture="qwen3_next", linear_attention=LinearAttention((0,), 8, 16, 12, 10, 4))
SPARSE = replace(DENSE, architecture="qwen3_moe", experts=ExpertShapes(6, 2, 24))


@pytest.mark.parametrize(
    ("shapes", "parallel", "said"),
    [
        (DENSE, ParallelConfig(tensor=3), "'parallel.tensor' is 3, which does not divide the model's num_attention_heads 4; 2 does"),
        (DENSE, ParallelConfig(tensor=4), "'parallel.tensor' is 4, which does not divide the model's num_key_value_heads 2; 2 does"),
        (replace(DENSE, intermediate_size=51), ParallelConfig(tensor=2), "which does not divide the model's intermediate_size 51; 1 does"),
        (replace(DENSE, hidden_size=37), ParallelConfig(tensor=2, deterministic=True), "which does not divide the model's hidden_size 37"),
        (replace(DENSE, vocab_size=1), ParallelConfig(tensor=2), "'parallel.tensor' is 2, too many for the model's vocabulary of 1"),
        (replace(SPARSE, experts=ExpertShapes(6, 2, 25)), ParallelConfig(tensor=2), "the model's experts' intermediate_size 25"),
        (DENSE, ParallelConfig(pipeline=4), "'parallel.pipeline' is 4; the model has 3 layers, and a stage needs one"),
        (
            DENSE, ParallelConfig(pipeline=2, virtual_stages=2, schedule="interleaved"),
            "'parallel.pipeline' is 2 times parallel.virtual_stages 2; the model has 3 layers",
        ),
        (DENSE, ParallelConfig(data=2, expert=2), "'parallel.expert' is 2; this qwen3 model has no experts: leave it at 1"),
        (HYBRID, ParallelConfig(context=6, tensor=2), "'parallel.context' is 6, which does not divide the 4 key heads of linear attention on each of 2"),
        (SPARSE, ParallelConfig(data=4, expert=4), "'parallel.expert' is 4, which does not divide the model's 6 experts"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_the_model_is_refused_in_one_line(shapes, parallel, said) -> None:
    with pytest.raises(UserError) as caught:
        check_layout(shapes, parallel)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(data=3, tensor=2, pipeline=3, context=2, expert=6)])
def test_a_mesh_that_divides_the_model_is_let_pass(parallel) -> None:
    check_layout(replace(SPARSE, hidden_size=36), parallel)
    check_layout(replace(DENSE, num_hidden_layers=3), replace(parallel, expert=1))


def test_the_check_imports_no_torch() -> None:
    code = "import sys, tandem.layout.mesh_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
