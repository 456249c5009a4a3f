"""Agreement of the answer matcher with math-verify's own examples.

    git clone https://github.com/huggingface/Math-Verify
    python benchmarks/math_agreement.py Math-Verify/tests/test_all.py

Each parametrized example (ground truth, completion, whether they are equal) of that file is judged by `answer_matcher` with `compare: math_verify`, with the
precision and the comparison of relations that the example names. Examples that name other classes of the library are left out.
"""

import ast
from pathlib import Path
from typing import Any

from machine import machine, write_report
from options import parser as shared_parser

from tandem.config.rewards import AnswerMatcherConfig
from tandem.rl.rewards.answer_matcher import match_answer

OPTIONS = {"precision": "precision", "allow_set_relation_comp": "relation_is_set"}
"""The keys of the matcher for arguments of the library's tests."""


def examples(path: Path) -> list[tuple[str, str, bool, dict[str, Any]]]:
    """Returns the ground truth, the completion, whether they are equal, and the matcher's settings of each example."""
    found = []
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        decorators = function.decorator_list if isinstance(function, ast.FunctionDef) else []
        for call in (each for each in decorators if isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "parametrize"):
            names = [name.strip() for name in str(ast.literal_eval(call.args[0])).split(",")]
            if names[:3] != ["gold", "pred", "expected"] or not set(names[3:]) <= set(OPTIONS) or not isinstance(call.args[1], ast.List):
                continue
            for row in call.args[1].elts:
                try:
                    gold, pred, expected, *more = ast.literal_eval(row)
                except ValueError:  # It names a class.
                    continue
                found.append((gold, pred, bool(expected), {OPTIONS[name]: value for name, value in zip(names[3:], more, strict=True)}))
    return found


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("path", type=Path, help="tests/test_all.py of a clone of Math-Verify")
    options = parser.parse_args()
    rows, lines = examples(options.path), []
    for gold, pred, expected, settings in rows:
        judgement = match_answer(pred, gold, AnswerMatcherConfig(compare="math_verify", **settings), 0.0)
        if (judgement.value == 1.0) != expected:
            lines.append(f"| `{gold!r:.60}` | `{pred[-60:]!r}` | {expected} | {judgement.value} |")
    text = [
        "# Agreement with math-verify's examples", "", machine(), "", f"{len(rows) - len(lines)} of {len(rows)} examples. The others:", "",
        "| ground truth | completion | equal for the library | reward |", "| --- | --- | --- | --- |", *lines,
    ]  # fmt: skip
    print("\n".join(text))
    print(f"wrote {write_report('math-agreement', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
