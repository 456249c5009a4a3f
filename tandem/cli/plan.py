"""Predict the time, memory and cost of training a model on GPUs, and recommend how to lay it out.

Needs no GPU and no torch. With a layout (--tp, --pp, --dp, ...) it scores that layout; without one it recommends one, says what beats the rule of thumb
and by how much, and compares the alternatives.

examples:
  tandem plan MODEL_FOLDER --gpu H100-80GB --gpus 64 --seq 8192 --global-batch 512
  tandem plan --gpu H100-80GB --gpus 768 --hidden 8192 --layers 84 --heads 64 --ffn 32768 --gated-mlp false --vocab 131072 --seq 4096 \\
      --global-batch 384 --tp 8 --pp 2 --dp 48 --zero 1 --recompute selective --json
  tandem plan RECIPE --gpus 8 --emit slurm --recipe plan.yaml --slurm.partition=gpu --slurm.time=0-08:00:00
  tandem plan sort_partial --gpus 8 --response-tokens 20      also a step of reinforcement learning
  tandem plan serving --help                                the engines that serve a load: a command of its own
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.runtime.process.program import program
from tandem.runtime.process.temporary import temporary_folder
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe
    from tandem.estimate.hardware.hardware import Hardware
    from tandem.estimate.training.layout import Recompute, TrainingLayout
    from tandem.layout.latent_attention import LatentAttention
    from tandem.layout.shapes import ModelShapes
    from tandem.planner.plan import Plan
    from tandem.planner.request import PlanRequest
    from tandem.planner.score import Score

LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SIZES = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "experts_per_token", "expert_ffn", "shared_ffn", "dense_layers",
    "sliding_window", *LATENT, "q_lora_rank",
)  # fmt: skip
AXES = ("tp", "pp", "virtual_pp", "dp", "ep", "cp", "zero")
RL_FLAGS = ("prompt_tokens", "response_tokens", "response_p95", "draft_acceptance", "shared_prefix", "measured")
PROGRESS_EVERY = 200


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a Hugging Face folder or config.json, or a recipe; otherwise the sizes below")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="also write a page: memory by phase and by stage, the pipeline's timeline, the front of time and memory")
    parser.add_argument("--emit", choices=("recipe", "slurm", "kubernetes"), help="print a recipe with the layout instead, or the job of a scheduler with it")
    parser.add_argument("--recipe", metavar="FILE", help="with --emit: also write the recipe to this file")
    parser.add_argument("--checklist", action="store_true", help="print the production checklist of the recipe instead")
    hardware = parser.add_argument_group("GPUs")
    hardware.add_argument(
        "--gpu", default="H100-80GB", help="a kind of GPU, a YAML file with its figures, or this-machine: its GPUs, or its CPU measured (default: H100-80GB)",
    )  # fmt: skip
    hardware.add_argument("--gpus", type=int, help="how many (default: the product of the axes, or a node)")
    hardware.add_argument("--price", metavar="DOLLARS", help="US dollars of an hour of one GPU (default: the hardware file's price_per_hour)")
    hardware.add_argument(
        "--what-if", action="append", default=[], metavar="CHANGES",
        help="also plan for other GPUs, side by side: gpu=H200, gpus=128, interconnect=400Gb/s, link=450GB/s, price=2.5, or several with commas; repeatable",
    )  # fmt: skip
    size_arguments(parser)
    _step_arguments(parser)


def size_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that describe a model."""
    sizes = parser.add_argument_group("sizes of the model")
    for name, text in (
        ("hidden", "hidden size"), ("layers", "layers"), ("heads", "query heads"), ("kv_heads", "key-value heads (default: as many as query heads)"),
        ("head_dim", "size of a head (default: hidden / heads)"), ("ffn", "inner size of an MLP (default: 4 x hidden)"), ("vocab", "vocabulary"),
        ("experts", "experts of a layer"), ("experts_per_token", "experts that a token visits"), ("expert_ffn", "inner size of an expert (default: --ffn)"),
        ("shared_ffn", "inner size of the shared experts of a layer together"), ("dense_layers", "first layers, which have no experts"),
        ("sliding_window", "window of attention in every layer, in tokens"),
        ("kv_lora_rank", "latent attention: size of the compressed keys and values"), ("q_lora_rank", "of compressed queries (default: none)"),
        ("qk_nope_head_dim", "size of a head of queries and keys without rotation"), ("qk_rope_head_dim", "size of its rotated part"),
        ("v_head_dim", "size of a head of values"),
    ):  # fmt: skip
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    sizes.add_argument("--gated-mlp", choices=("true", "false"), default="true", help="an MLP has gate, up and down, or up and down (default: true)")
    sizes.add_argument("--tied-embeddings", choices=("true", "false"), default="false", help="embedding and head are one matrix (default: false)")
    sizes.add_argument("--ignore-fields", default="", metavar="NAMES", help="keys of config.json, separated by commas, that change no size")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    batch = parser.add_argument_group("the step")
    batch.add_argument("--seq", type=int, help="tokens of a sequence (default: 4096, or the recipe's)")
    batch.add_argument("--global-batch", type=int, help="sequences of a step (default: 4 for each GPU, or the recipe's)")
    batch.add_argument("--micro-batch", type=int, help="sequences of a pass of one data-parallel rank (default: chosen; 1 with a layout)")
    batch.add_argument("--precision", choices=("fp32", "bf16", "fp16", "fp8"), default="bf16", help="of the products (default: bf16)")
    batch.add_argument(
        "--recompute", choices=("none", "selective", "sp_selective", "full"),
        help="what the backward pass computes again (default: chosen; none with a layout)",
    )  # fmt: skip
    batch.add_argument("--train-tokens", metavar="N", help="tokens of a whole run, such as 15e12: also its time and cost, with checkpoints and failures")
    rl = parser.add_argument_group("a step of reinforcement learning, of its recipe")
    rl.add_argument("--prompt-tokens", type=int, help="mean tokens of a prompt (default: 512, or half of what the context leaves)")
    rl.add_argument("--response-tokens", type=int, help="mean tokens of a completion (default: half of rollout.max_tokens)")
    rl.add_argument("--response-p95", type=int, help="tokens that 95 %% of the completions do not exceed (default: twice the mean)")
    rl.add_argument(
        "--draft-acceptance", type=float, metavar="RATE",
        help="probability that a draft token of rollout.engine.speculative_config is accepted (default: drafts save nothing)",
    )  # fmt: skip
    rl.add_argument("--shared-prefix", type=int, metavar="TOKENS", help="tokens with which all prompts begin, such as a system prompt (default: 0)")
    rl.add_argument(
        "--measured", metavar="RUN",
        help="the folder of a run: its lengths, what its samples begin with in common and the acceptance of its drafts, unless flags give them",
    )  # fmt: skip
    layout = parser.add_argument_group("a layout to score")
    for name, text in (
        ("tp", "tensor-parallel ranks"), ("pp", "pipeline-parallel ranks"), ("virtual_pp", "stages on each of them"), ("dp", "data-parallel ranks"),
        ("ep", "expert-parallel ranks, within data x context"), ("cp", "context-parallel ranks"),
    ):  # fmt: skip
        layout.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    layout.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="what data-parallel ranks shard (default: 1)")
    layout.add_argument("--sequence-parallel", choices=("true", "false"), help="tensor-parallel ranks divide the tokens too (default: true but with full)")
    layout.add_argument(
        "--attention", choices=("auto", "fused", "flash2", "flash1", "unfused"), default="auto",
        help="kernel: the GPU's fastest, a generation of FlashAttention, or one that keeps scores (auto: flash2 with --zero 3, unfused in fp16, else fused)",
    )  # fmt: skip
    layout.add_argument(
        "--tensor-overlap", choices=("auto", "none", "backward", "all"), default="auto",
        help="what hides tensor-parallel communication: nothing, gradients of weights, all products (auto: all, but none with --zero 3)",
    )  # fmt: skip
    for name, choices, text in (
        ("expert_dispatch", ("copies", "once"), "a token travels once for each expert, or once to each node and GPU (DeepEP; default: copies)"),
        ("experts_as", ("each", "padded", "grouped"), "products of each expert a kernel of its own, padded to a capacity, or grouped in one (default: each)"),
        ("reduce_precision", ("fp32", "bf16"), "of gradients that ranks sum (default: fp32)"),
        ("state_precision", ("fp32", "bf16"), "of the weights that the optimizer updates and its moments (default: fp32)"),
        ("fp8_scaling", ("delayed", "current", "block"), "of fp8 operands, by earlier steps, their own largest value or their blocks' (default: delayed)"),
        ("loss_precision", ("fp32", "bf16"), "of the softmax of the logits (default: fp32)"),
    ):
        layout.add_argument(f"--{name.replace('_', '-')}", choices=choices, default=choices[0], help=text)
    layout.add_argument("--sum-gradients-once", action="store_true", help="with --zero 3, gradients stay whole until the last micro-batch")
    layout.add_argument("--whole-vocabulary", action="store_true", help="each tensor-parallel rank has the whole embedding and all logits")
    layout.add_argument("--whole-experts", action="store_true", help="tensor-parallel ranks have experts of their own: --ep x --tp ranks divide them")
    layout.add_argument("--overlap-experts", action="store_true", help="the exchange between experts is hidden behind another micro-batch")
    layout.add_argument("--expert-imbalance", type=float, default=1.0, metavar="X", help="tokens of the fullest expert-parallel rank over the mean")
    layout.add_argument("--cuda-graphs", action="store_true", help="kernels are not started one by one")
    parser.set_defaults(takes_overrides=True)
    layout.add_argument("--offload", choices=("none", "cpu", "nvme"), default="none", help="where the optimizer's state is (default: none)")


def run(options: argparse.Namespace) -> int:
    if options.model is not None and options.model.startswith("--"):
        # argparse takes an unknown option with a space in it for the positional argument.
        options.model, options.overrides = None, [*options.overrides, options.model]
    if options.overrides and options.emit not in ("slurm", "kubernetes"):
        raise UserError(f"unknown argument '{options.overrides[0]}'; keys of the recipe are for '--emit slurm' and '--emit kubernetes' ('tandem plan --help')")
    if options.recipe is not None and options.emit is None:
        raise UserError("--recipe is the file of the recipe that --emit prints or places; give --emit recipe, slurm or kubernetes")
    if options.checklist:
        return _print_checklist(options)
    request = _request(options)
    layout = _layout(options, request)
    from tandem.planner import as_json, as_text
    from tandem.planner.page import plan_page, score_page
    from tandem.planner.plan import make_plan
    from tandem.planner.score import score
    from tandem.planner.what_if import changed, compare_layout, compare_plans, whole_front

    for words in options.what_if:
        changed(request, words)
    progress = _progress if sys.stderr.isatty() else None
    recipe = _rl_recipe(options)
    plan: Plan | None = None
    front: list[tuple[str, Score]] = []
    if layout is not None:
        scored = score(request.shapes, layout, request.hardware)
        compared = compare_layout(scored, request, options.what_if)
        text, answer = as_text.score_text(scored), as_json.score_json(scored)
    else:
        plan = make_plan(request, progress)
        compared = compare_plans(request, options.what_if, progress)
        scored, front = plan.chosen, list(whole_front(plan, compared)) if compared else []
        text, answer = as_text.plan_text(plan), as_json.plan_json(plan)
    beside, pod = "", None
    if compared:
        beside += "\n" + as_text.what_if_text(scored, compared, front)
        answer |= as_json.what_if_json(scored, compared, front)
    if options.train_tokens is not None:
        from tandem.planner.run_plan import plan_run, run_json, run_text

        whole = plan_run(scored, options.train_tokens)
        beside += f"\n\n{run_text(whole)}"
        answer |= {"run": run_json(whole)}
    if recipe is not None:
        from tandem.planner.pod_memory import plan_pod_memory, pod_memory_json, pod_memory_text
        from tandem.planner.rl_plan import described_rl_step

        words, figures = described_rl_step(recipe, scored, *(getattr(options, name) for name in RL_FLAGS))
        pod = plan_pod_memory(recipe, scored)
        beside += f"\n\n{words}\n\n{pod_memory_text(pod)}"
        answer |= {"rl_step": figures, "pod_memory": pod_memory_json(pod)}
    if options.html:
        page = score_page(scored, beside, pod) if plan is None else plan_page(plan, beside, pod)
        _write("--html", options.html, page)
    print(_emitted(options, scored) if options.emit else json.dumps(answer, indent=2) if options.json else text + beside)
    return 0


def _write(flag: str, file: str, text: str) -> None:
    """Writes the file of a flag. Raises ``UserError`` where that cannot be."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} is '{file}', which cannot be written: {error.strerror}; name a file in a folder that is there") from None


def _rl_recipe(options: argparse.Namespace) -> "Recipe | None":
    """Returns the recipe if it is one of reinforcement learning, ``None`` for anything else. Raises ``UserError`` for lengths of a step without one."""
    from tandem.config.recipe import Recipe, load_config
    from tandem.planner.model_input import is_recipe

    recipe = load_config(options.model) if options.model is not None and is_recipe(options.model) else None
    if isinstance(recipe, Recipe):
        return recipe
    for name in RL_FLAGS:
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} is of a step of reinforcement learning; name its recipe, for example 'tandem plan sort', or leave it out"
            )
    return None


def _print_checklist(options: argparse.Namespace) -> int:
    """Prints the checklist of a recipe. Returns 1 if an item is not met."""
    from tandem.config.recipe import load_config
    from tandem.planner.checklist import checklist, checklist_text
    from tandem.planner.model_input import is_recipe

    if options.model is None or not is_recipe(options.model):
        raise UserError("--checklist is of a recipe; name one, for example 'tandem plan sort --checklist'")
    items = checklist(load_config(options.model), hardware_named(options.gpu))
    print(json.dumps([asdict(each) for each in items], indent=2) if options.json else checklist_text(items))
    return 0 if all(each.is_met for each in items) else 1


def _emitted(options: argparse.Namespace, scored: "Score") -> str:
    """Returns the recipe with the layout, or the job that a launcher makes of it."""
    from tandem.cluster.launch.choose import launcher
    from tandem.cluster.launch.launcher import Launch
    from tandem.config.bundled import recipe_file
    from tandem.planner.emit import emitted
    from tandem.planner.model_input import is_recipe

    recipe = str(recipe_file(options.model)) if options.model is not None and is_recipe(options.model) else None
    for key, example in (("model.path", "MODEL_FOLDER"), ("data.train", "'[{path: TOKENIZED_FOLDER}]'")):
        known = recipe is not None or (key == "model.path" and options.model is not None)
        if options.emit != "recipe" and not known and not any(each.startswith(f"--{key}=") for each in options.overrides):
            raise UserError(f"the job has no {key}; give a recipe, or --{key}={example}")
    written = emitted(scored, options.emit, recipe, None if recipe else options.model)
    with temporary_folder() as folder:
        # A run without a name has that of its recipe.
        file = folder / Path(options.recipe or "plan.yaml").name
        file.write_text(written, encoding="utf-8")
        job = "" if options.emit == "recipe" else launcher(options.emit).plan(Launch(str(file), tuple(options.overrides)))
    if options.recipe:
        _write("--recipe", options.recipe, written)
    if options.emit == "recipe":
        return written.rstrip()
    # A batch script begins with its shell, and comments may stand before what it asks for.
    first, *rest = job.splitlines() if options.emit == "slurm" else ["", *job.splitlines()]
    submit = f"{program()} train {shlex.quote(options.recipe or 'plan.yaml')} --on {options.emit}"
    note = f"# {submit} makes the run's folder and submits this." + ("" if options.recipe else " --recipe plan.yaml writes its recipe.")
    return "\n".join([first, written.splitlines()[0], note, *rest] if first else [written.splitlines()[0], note, *rest])


def _progress(done: int, of: int) -> None:
    if done % PROGRESS_EVERY == 0 or done == of:
        print(f"\r{done:,} of {of:,} layouts{'' if done < of else chr(13) + ' ' * 40 + chr(13)}", end="", file=sys.stderr, flush=True)


def _request(options: argparse.Namespace) -> "PlanRequest":
    from tandem.planner.request import PlanRequest
    from tandem.planner.what_if import price

    shapes, defaults = model_of(options)
    hardware = hardware_named(options.gpu)
    if options.price is not None:
        hardware = replace(hardware, price_per_hour=price(options.price, "--price"), sources={**hardware.sources, "price_per_hour": "--price"})
    axes = [getattr(options, name) for name in ("tp", "pp", "cp", "dp")]
    product = 1
    for size in axes:
        product *= size or 1
    gpus = options.gpus if options.gpus is not None else product if any(axes) else hardware.gpus_per_node
    sequence = options.seq if options.seq is not None else defaults.get("sequence", 4096)
    batch = options.global_batch if options.global_batch is not None else defaults.get("global_batch", 4 * gpus)
    request = PlanRequest(shapes, hardware, gpus, sequence, batch, options.precision, options.recompute, options.micro_batch, defaults.get("trainer"))
    request.check()
    return request


def hardware_named(name_or_path: str) -> "Hardware":
    """Returns the hardware that ``--gpu`` names: a file, or this machine, which is measured only where it is asked for."""
    from tandem.estimate.hardware.load import THIS_MACHINE, load_hardware

    if name_or_path.lower() != THIS_MACHINE:
        return load_hardware(name_or_path)
    from tandem.jobs.checks.planned_machine import planned_machine

    return planned_machine()


def model_of(options: argparse.Namespace) -> "tuple[ModelShapes, dict[str, Any]]":
    """Returns the sizes of the model that ``options`` describe, and what a recipe says of the step."""
    if options.model is None:
        return _shapes(options), {}
    from tandem.planner.model_input import read_model

    for name in SIZES:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} and the model '{options.model}' both give sizes; leave one out")
    return read_model(options.model, tuple(filter(None, options.ignore_fields.split(","))))


def _shapes(options: argparse.Namespace) -> "ModelShapes":
    from tandem.layout.expert_shapes import ExpertShapes
    from tandem.layout.shapes import ModelShapes

    for name in ("hidden", "layers", "heads", "vocab"):
        if getattr(options, name) is None:
            raise UserError(f"--{name} is missing; give --hidden, --layers, --heads and --vocab, or a Hugging Face folder or a recipe")
    for name in SIZES:
        if getattr(options, name) is not None and not 1 <= getattr(options, name) <= 10_000_000:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be from 1 to 10,000,000")
    hidden, heads, latent = options.hidden, options.heads, _latent(options)
    if options.head_dim is None and latent is None and hidden % heads:
        raise UserError(f"--heads is {heads}, which does not divide --hidden {hidden}; change one, or give --head-dim")
    kv_heads = options.kv_heads or heads
    if heads % kv_heads:
        raise UserError(f"--kv-heads is {kv_heads}, which does not divide --heads {heads}")
    inner, experts = options.ffn or 4 * hidden, None
    for name in ("experts_per_token", "expert_ffn", "shared_ffn", "dense_layers"):
        if options.experts is None and getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is given without --experts; give both or neither")
    if (options.dense_layers or 0) > options.layers:
        raise UserError(f"--dense-layers is {options.dense_layers}, more than --layers {options.layers}")
    try:
        if options.experts is not None:
            experts = ExpertShapes(
                options.experts, options.experts_per_token or 1, options.expert_ffn or inner, shared_intermediate_size=options.shared_ffn or 0,
                dense_layers=tuple(range(options.dense_layers or 0)),
            )  # fmt: skip
        head_dim = latent.head_dim if latent is not None else options.head_dim or hidden // heads
        return ModelShapes(
            "model", options.vocab, hidden, options.layers, heads, kv_heads, head_dim, inner, 2**31, options.tied_embeddings == "true",
            gated_mlp=options.gated_mlp == "true", experts=experts, latent=latent,
            layer_windows=() if options.sliding_window is None else (options.sliding_window,) * options.layers,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None


def _latent(options: argparse.Namespace) -> "LatentAttention | None":
    """Returns the latent attention of the flags, ``None`` without any."""
    from tandem.layout.latent_attention import LatentAttention

    given = [name for name in (*LATENT, "q_lora_rank") if getattr(options, name) is not None]
    if not given:
        return None
    for name in LATENT:
        if getattr(options, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is missing; latent attention (--{given[0].replace('_', '-')}) needs it")
    for name in ("kv_heads", "head_dim"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} has no meaning with latent attention (--kv-lora-rank); leave it out")
    return LatentAttention(**{name: getattr(options, name) for name in LATENT}, q_lora_rank=options.q_lora_rank or 0)


def _layout(options: argparse.Namespace, request: "PlanRequest") -> "TrainingLayout | None":
    """Returns the layout of the flags, ``None`` without any."""
    from tandem.config.parallel import ParallelConfig
    from tandem.estimate.training.layout import TrainingLayout
    from tandem.planner.layouts import check_training_layout, with_stages

    if all(getattr(options, name) is None for name in AXES):
        return None
    tensor, pipeline, context, virtual, expert = (1 if getattr(options, n) is None else getattr(options, n) for n in ("tp", "pp", "cp", "virtual_pp", "ep"))
    data = options.dp if options.dp is not None else max(1, request.gpus // max(1, tensor * pipeline * context))
    recompute: Recompute = options.recompute or "none"
    # Full recomputation is older than sequence parallelism (Korthikanti et al., 2022), and recipes with it do without.
    divides = recompute != "full" if options.sequence_parallel is None else options.sequence_parallel == "true"
    zero = options.zero if options.zero is not None else int(data * context > 1)
    parallel = ParallelConfig(
        data=data, tensor=tensor, pipeline=pipeline, context=context, expert=expert, virtual_stages=virtual, sequence_parallel=divides, zero=zero,  # type: ignore[arg-type]
    )  # fmt: skip
    layout = TrainingLayout(
        parallel, request.sequence, request.global_batch, options.micro_batch if options.micro_batch is not None else 1, request.precision, recompute,
        options.offload, reshard_after_forward=pipeline == 1, attention=options.attention,
        tensor_overlap=options.tensor_overlap, expert_dispatch=options.expert_dispatch, experts_as=options.experts_as, cuda_graphs=options.cuda_graphs,
        reduce_precision=options.reduce_precision, state_precision=options.state_precision, reduces_each_pass=not options.sum_gradients_once,
        fp8_scaling=options.fp8_scaling, loss_precision=options.loss_precision, whole_vocabulary=options.whole_vocabulary,
        whole_experts=options.whole_experts, overlaps_experts=options.overlap_experts, expert_imbalance=options.expert_imbalance,
    )  # fmt: skip
    check_training_layout(request.shapes, layout, request.gpus)
    return request.completed(replace(layout, parallel=with_stages(parallel, request.shapes.num_hidden_layers)))
