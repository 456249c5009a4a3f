"""Go on with a run that was interrupted or killed, from its newest committed checkpoint.

Samples and scores that the run had already written down are used again, not drawn or computed a second time. In
deterministic mode the resumed run equals the undisturbed one bit for bit; a machine with other threads, instruction set or
torch build is refused.

A run may go on with other values of the sections parallel and machine, and of trainer.offload, trainer.offload_parameters,
trainer.offload_activations and trainer.offload_folder; on another mesh its numbers differ in their last bits.

examples:
  tandem resume runs/sort
  tandem resume runs/pretrain --parallel.data=4      on another number of ranks: no sample is lost or repeated
"""

import argparse

from tandem.cli.display import display
from tandem.runtime.process.faults import FaultPlan


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--from", dest="source", metavar="URL", help="make the folder again from what checkpoint.upload copied there")
    parser.add_argument("--inline", action="store_true", help="both sidecars in this process, for a debugger")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from tandem.jobs.start import resume
    from tandem.jobs.uploads import restore

    if options.source:
        restore(options.run_directory, options.source)
    with display() as callback:
        result = resume(
            options.run_directory, inline=options.inline, callback=callback, overrides=options.overrides,
            faults=FaultPlan.parse(options.fault) if options.fault else None,
        )
    print(result.summary())
    return 0
