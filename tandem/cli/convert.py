"""Convert a model to another file format, bit for bit.

SRC is a Hugging Face folder, a model of the Hugging Face Hub (OWNER/NAME), a Tandem checkpoint (runs/NAME/checkpoints/step-N)
or a Megatron checkpoint; its files show which. DST is a new folder. --tensor, --pipeline and --expert are the sizes of a
Megatron mesh, --virtual-pipeline the stages on each rank of an interleaved pipeline; the config and the tokenizer, which Megatron
checkpoints do not contain, are written to DST/huggingface. Without that folder, the config of a Megatron SRC is read from its args
or from --config.

"megatron-dist" is Megatron's distributed format (torch_dist), which any of its meshes loads; Megatron-Core itself writes and reads it,
in the environment that 'tandem sidecar install megatron' makes, and it needs CUDA.

examples:
  tandem convert runs/pretrain/checkpoints/step-300 models/small
  tandem convert models/small models/small-megatron --to megatron --tensor 2 --pipeline 2
  tandem convert models/small-megatron models/back --from megatron --to huggingface
"""

import argparse
import json
from pathlib import Path

LAYOUTS = ("huggingface", "megatron", "megatron-dist", "tandem")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a model or a checkpoint")
    parser.add_argument("target", metavar="DST", help="the folder to write; must not exist")
    parser.add_argument("--from", dest="of", choices=LAYOUTS, help="the format of SRC (default: detected from its files)")
    parser.add_argument("--to", choices=LAYOUTS[:3], default="huggingface", help="the format of DST (default: huggingface)")
    for axis, what in (("tensor", "tensor-parallel ranks"), ("pipeline", "pipeline-parallel ranks"), ("expert", "expert-parallel ranks")):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{what} of a Megatron DST")
    parser.add_argument("--virtual-pipeline", type=int, default=1, help="stages on each pipeline rank of a Megatron DST, which is then interleaved")
    parser.add_argument("--spelling", choices=("transformer_engine", "local"), default="transformer_engine", help="the tensor names in a Megatron DST")
    parser.add_argument("--config", type=Path, help="a folder with config.json (and the tokenizer), if SRC has none")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    from tandem.cli.engine_options import local_model
    from tandem.jobs.convert import convert
    from tandem.model.megatron.layout import MegatronMesh
    from tandem.model.model_source import find_model
    from tandem.types import UserError

    source = Path(local_model(options.source))
    config = None if options.config is None else find_model(str(options.config), "description")
    mesh = MegatronMesh(options.tensor, options.pipeline, options.expert, options.virtual_pipeline)
    if options.to != "megatron" and mesh != MegatronMesh():
        raise UserError("--tensor, --pipeline, --virtual-pipeline and --expert shard a Megatron checkpoint; add --to megatron or leave them out")
    done = convert(
        source, Path(options.target), of=options.of, to=options.to, mesh=mesh, spelling=options.spelling, config=config
    )
    if options.json:
        print(json.dumps({"from": done.source, "to": done.target, "tensors": done.tensors, "numbers": done.numbers, "path": options.target}))
    else:
        print(f"{done.tensors} tensors of {done.numbers:,} numbers, {done.source} to {done.target}: {options.target}")
    return 0
