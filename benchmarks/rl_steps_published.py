"""Published seconds of steps of reinforcement learning on GPUs beside what the planner predicts for the same settings.

    python benchmarks/rl_steps_published.py [--out benchmarks/results]

The rows are in ``benchmarks/published/rl_steps.csv``: all rows of NeMo RL's tables in bf16 on DGX H100 with a policy that is at most one step off, but the
one of DAPO, whose dynamic sampling draws more than it trains on. Nothing was fitted on them, no constant and no switch, and they were looked up after the model
was written. What the tables leave open is that of the recipes of the same versions (``examples/configs`` there): memory for the engine, two passes
without gradients (the policy's and the reference's log-probabilities), packed micro-batches of one longest sequence, recomputation. The tables have mean
lengths only; completions are lognormal with the planner's usual spread, cut at the longest sequence, so that their mean is the published one. The prompt is
what is left of the trained tokens (tokens/s/GPU x seconds x GPUs / samples), the median of all rows of a model, since each figure is a mean of five steps.
With a policy that is one step off half of the GPUs train and half generate.
The host's work between the steps of an engine is that of the release of vLLM that each version has (``serving.host``); it was added after the errors were seen.
Megatron-Core's expert-parallel ranks may take the place of tensor-parallel ones; here they are within data and context, and tensor-parallel ranks divide the
experts' matrices: as many parts.

A second table has seconds by phase, of Llama 3.1 8B and 70B in NeMo RL 0.3: what was published and what a user measured with the same recipes
(``benchmarks/published/rl_phases.csv``; https://github.com/NVIDIA-NeMo/RL/issues/959). Its settings are those of version 0.3.0's
``grpo_math_8B_megatron.yaml``, ``grpo_math_8B.yaml`` and ``grpo_math_70B_megatron.yaml``; its prompts are those of the first table. ``other`` is what is left
of a step.
"""

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from machine import HERE, machine, write_report
from options import parser

from tandem.config.parallel import ParallelConfig
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.lengths import USUAL_SPREAD, Lengths
from tandem.estimate.rl_step import RLStep, RLStepTime, predict_rl_step
from tandem.estimate.serving.host import HIDDEN, SEQUENCE_S
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import with_stages

SOURCES = {
    f"nemo-rl-{version}": f"https://github.com/NVIDIA-NeMo/RL/blob/{place}/docs/about/performance-summary.md"
    for version, place in (("0.4", "v0.4.0"), ("0.5", "9dbd9adc9"), ("0.6", "v0.6.0"))
}


def decoder(layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, experts: ExpertShapes | None = None) -> ModelShapes:
    return ModelShapes("llama", vocab, hidden, layers, heads, kv, 128, inner, 131072, False, experts=experts)


LATENT = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
MODELS = {
    "llama-3.1-8b": decoder(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": decoder(80, 8192, 64, 8, 28672, 128256),
    "qwen3-32b": decoder(64, 5120, 64, 8, 25600, 151936),
    "qwen3-30b-a3b": decoder(48, 2048, 32, 4, 6144, 151936, ExpertShapes(128, 8, 768)),
    "qwen3-235b-a22b": decoder(94, 4096, 64, 4, 12288, 151936, ExpertShapes(128, 8, 1536)),
    "deepseek-v3": ModelShapes(
        "deepseek_v3", 129280, 7168, 61, 128, 128, LATENT.head_dim, 18432, 131072, False, latent=LATENT,
        experts=ExpertShapes(256, 8, 2048, shared_intermediate_size=2048, dense_layers=(0, 1, 2)),
    ),
}  # fmt: skip
COLOCATED_SHARE, APART_SHARE, LARGE_APART_SHARE = 0.6, 0.8, 0.88
"""``gpu_memory_utilization`` of the recipes: on the trainer's GPUs, on others, and there of Qwen3-235B."""
SEQUENCES, BATCHED_TOKENS = 1024, 16384
"""vLLM's defaults of ``LLM`` on an H100, which the recipes leave: ``max_num_seqs`` and ``max_num_batched_tokens``."""
PASSES = 2
HOSTS = {"nemo-rl-0.3": "vllm-0.8", "nemo-rl-0.4": "vllm-0.8", "nemo-rl-0.5": "vllm-0.8", "nemo-rl-0.6": HIDDEN}
"""Of the engines: NeMo RL 0.3 has vLLM 0.9.0, 0.4 has 0.10.0, 0.5 has 0.11.2 and 0.6 has 0.17.1 (its ``pyproject.toml``)."""


@dataclass(frozen=True, slots=True)
class Published:
    """A row: what was measured, and the step as the planner sees it."""

    row: Mapping[str, str]
    shapes: ModelShapes
    step: RLStep

    @property
    def seconds(self) -> float:
        return float(self.row["step_seconds"])

    def predicted(self) -> RLStepTime:
        return predict_rl_step(self.shapes, load_hardware(self.row["gpu"]), self.step)


def cut_lengths(mean: float, most: float) -> Lengths:
    """Returns lognormal lengths cut at ``most`` whose mean is ``mean`` after the cut."""
    low, high = mean, 100 * most
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if Lengths.around(middle, USUAL_SPREAD, most).mean < mean else (low, middle)
    return Lengths.around(low, USUAL_SPREAD, most)


def left_for_prompt(row: Mapping[str, str]) -> float:
    """Returns the trained tokens of a sample that were not generated."""
    tokens = float(row["tokens_per_s_per_gpu"]) * float(row["step_seconds"]) * float(row["gpus"])
    return tokens / (float(row["prompts"]) * float(row["group"])) - float(row["response_tokens"])


def published(row: Mapping[str, str], prompt: float) -> Published:
    """Returns the step of a row with prompts of so many tokens."""
    whole = {key: int(value) for key, value in row.items() if value.isdigit()}
    shapes, gpus, is_ahead = MODELS[row["model"]], whole["gpus"], whole["steps_off"] > 0
    samples = whole["prompts"] * whole["group"]
    outputs = cut_lengths(whole["response_tokens"], whole["max_sequence"] - prompt)
    training = gpus // 2 if is_ahead else gpus
    data = training // (whole["tensor"] * whole["context"] * whole["pipeline"])
    parallel = ParallelConfig(
        data=data, tensor=whole["tensor"], context=whole["context"], pipeline=whole["pipeline"],
        expert=min(whole["expert"], data * whole["context"]), zero=whole.get("zero", 1),  # type: ignore[arg-type]
        sequence_parallel=whole["tensor"] > 1 and row.get("sequence_parallel") != "false",
    )  # fmt: skip
    layout = TrainingLayout(
        with_stages(parallel, shapes.num_hidden_layers), whole["max_sequence"], samples, 1, row["precision"], row["recompute"],  # type: ignore[arg-type]
    )  # fmt: skip
    memory = predict_rank_memory(shapes, layout)
    share = COLOCATED_SHARE if not is_ahead else LARGE_APART_SHARE if row["model"] == "qwen3-235b-a22b" else APART_SHARE
    engine = ServingLayout(
        whole["engine_tensor"], "bf16", "auto", SEQUENCES, BATCHED_TOKENS, share, max_model_len=whole["max_sequence"],
        host_sequence_s=SEQUENCE_S[HOSTS[row["source"]]],
    )  # fmt: skip
    step = RLStep(
        whole["prompts"], whole["group"], Lengths.around(prompt, 0.0), outputs, layout, engine, (gpus - training if is_ahead else gpus) // engine.tensor,
        passes=PASSES, minibatches=samples // whole["update_samples"], micro_batch_tokens=whole["max_sequence"],
        held_bytes=memory.parameters + memory.optimizer + memory.master_weights, is_ahead=is_ahead,
    )  # fmt: skip
    return Published(row, shapes, step)


def rows() -> list[Published]:
    read = _read("rl_steps.csv")
    prompts = {name: statistics.median(left_for_prompt(row) for row in read if row["model"] == name) for name in {row["model"] for row in read}}
    return [published(row, prompts[row["model"]]) for row in read]


def with_phases() -> list[Published]:
    """Returns the steps whose phases are published too."""
    prompt = statistics.median(left_for_prompt(row) for row in _read("rl_steps.csv") if row["model"] == "llama-3.1-8b")
    return [published(row, prompt) for row in _read("rl_phases.csv")]


def _read(name: str) -> list[dict[str, str]]:
    with (HERE / "published" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


PHASES = {
    "training": lambda time: time.training, "logprobs": lambda time: time.inference, "generation": lambda time: time.rollout,
    "refit": lambda time: time.weight_update + time.switch,
}  # fmt: skip
"""Of the second table, and what is predicted of each. Its refit moves the trainer's memory away too."""


def phase_error(each: Published, phase: str) -> float:
    return float(PHASES[phase](each.predicted()) / float(each.row[f"{phase}_seconds"]) - 1)


def _phase_lines() -> list[str]:
    lines = ["| source | model | GPUs | training | who | tokens | " + " | ".join(PHASES) + " | other | step |", "|---" * 12 + "|"]
    for each in with_phases():
        row, time = each.row, each.predicted()
        cells = [f"{float(row[f'{name}_seconds']):g} / {PHASES[name](time):.3g} ({phase_error(each, name):+.0%})" for name in PHASES]
        other = each.seconds - sum(float(row[f"{name}_seconds"]) for name in PHASES)
        trainer = "PyTorch FSDP" if row["zero"] == "3" else "Megatron-Core"
        lines.append(
            f"| {row['source']} | {row['model']} | {row['gpus']} | {trainer} | {row['who']} | {float(row['response_tokens']):,.0f} | {' | '.join(cells)} | "
            f"{other:g} / 0 | {each.seconds:g} / {time.seconds:.3g} ({time.seconds / each.seconds - 1:+.0%}) |"
        )
    means = [statistics.mean(phase_error(each, name) for each in with_phases()) for name in PHASES]
    return [*lines, "", "Mean errors by phase: " + ", ".join(f"{name} {mean:+.0%}" for name, mean in zip(PHASES, means, strict=True)) + "."]


def _summary(name: str, errors: list[float]) -> str:
    sizes = [abs(each) for each in errors]
    return f"| {name} | {len(errors)} | {statistics.mean(sizes):.0%} | {statistics.median(sizes):.0%} | {max(sizes):.0%} | {statistics.mean(errors):+.0%} |"


def main() -> int:
    options = parser(__doc__).parse_args()
    lines, errors = [], list[tuple[Published, float]]()
    for each in rows():
        time, row, held = each.predicted(), each.row, each.step
        error = time.seconds / each.seconds - 1
        errors.append((each, error))
        phases = " | ".join(f"{getattr(time, name):.3g}" for name in ("rollout", "tail", "inference", "training", "weight_update", "switch"))
        lengths = f"{held.prompt_lengths.mean:.0f} + {held.output_lengths.mean:,.0f}"
        lines.append(
            f"| {row['source']} | {row['model']} | {row['gpus']} | {'one step off' if held.is_ahead else 'on policy'} | {held.prompts} x {held.group} | "
            f"{lengths} | {phases} | {each.seconds:g} | {time.seconds:.3g} | {error:+.0%} |"
        )
    summary = ["| rows | count | mean error | median | worst | bias |", "|---" * 6 + "|", _summary("all", [error for _, error in errors])]
    for name in dict.fromkeys(each.row["model"] for each, _ in errors):
        summary.append(_summary(name, [error for each, error in errors if each.row["model"] == name]))
    for name, ahead in (("on policy, one set of GPUs", False), ("one step off, two halves", True)):
        summary.append(_summary(name, [error for each, error in errors if each.step.is_ahead == ahead]))
    header = [
        "| source | model | GPUs | policy | samples | tokens | rollout s | of it tail | inference | training | weight update | switch | published s "
        "| predicted s | error |",
        "|---" * 15 + "|",
    ]  # fmt: skip
    told = "\n\n".join((__doc__ or "").split("\n\n")[2:])
    sources = "Sources: " + ", ".join(f"[{name}]({address})" for name, address in SOURCES.items()) + "."
    by_phase = ["", "## By phase (seconds, published / predicted)", "", *_phase_lines()]
    text = "\n".join(["# Published steps of reinforcement learning", "", machine(), "", told, "", sources, "", *summary, "", *header, *lines, *by_phase])
    print(text)
    print(f"wrote {write_report('rl-steps-published', text, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
