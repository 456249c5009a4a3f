"""Continue an interrupted or killed run from its newest committed checkpoint.

Samples and scores in the run's journal are used again, not drawn or computed a second time. On the same mesh the resumed run
equals an undisturbed one bit for bit; a machine with another thread count, instruction set or torch build is refused. A run that has
finished is only reported, unless it is given more steps or a higher target.

The run's recipe, journal, metrics and start model are verified first, and every byte of the checkpoint; 'tandem verify' shows more.

The sections parallel, machine, checkpoint, registry, trackers, residents, coordination, pods, watchdog, slurm, ray, kubernetes and metrics, and
trainer.offload, trainer.offload_parameters, trainer.offload_activations, trainer.offload_folder, rollout.workers, run.max_steps,
run.max_restarts, run.elastic, run.on_mismatch,
evaluation.target_accuracy and evaluation.consecutive, may have new values; on another mesh results differ in their last bits.
run.max_steps cannot change once the learning rate has begun to fall towards it (trainer.schedule linear, cosine and wsd).

examples:
  tandem resume runs/sort --run.max_steps=400        train longer
  tandem resume runs/sort                            a run that was launched on Slurm, Ray or Kubernetes is one there again
  tandem resume runs/sort --on local                 here, in any case
  tandem resume runs/pretrain --parallel.data=4      on another number of ranks; no sample is lost or repeated
"""

import argparse
from pathlib import Path

from tandem.cluster.launch.launcher import LAUNCHERS, Launcher


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--from", dest="source", metavar="URL", help="restore the folder from the copies of checkpoint.upload")
    parser.add_argument("--on", choices=LAUNCHERS, help="where it continues (default: where it was launched)")
    parser.add_argument("--inline", action="store_true", help="run both sidecars in this process, for a debugger")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    # The process of a job, which has the run already.
    parser.add_argument("--of-job", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher, launcher_of
    from tandem.cluster.launch.elsewhere import check_not_elsewhere

    directory = Path(options.run_directory)
    if options.source:
        from tandem.jobs.uploads import restore

        restore(options.run_directory, options.source)
    if options.on == "local" or options.inline or options.fault:
        from tandem.cluster.launch.local import LocalLauncher

        chosen: Launcher = LocalLauncher(options.inline, options.fault)
    else:
        chosen = launcher(options.on) if options.on else launcher_of(directory)
    if not options.of_job:
        check_not_elsewhere(directory, chosen.name)
    print(chosen.resume(directory, options.overrides).text)
    return 0
