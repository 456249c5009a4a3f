"""The loop of pretraining and of supervised fine-tuning. They differ in their data: documents of which every next token is learned, or whole
examples (``sft``) of which the marked tokens are."""

from tandem.jobs.data_run.data_run import DataRun


def pretrain(run: DataRun) -> int:
    """Trains to ``run.max_steps``; returns the number of optimizer steps taken."""
    last = run.recipe.run.max_steps
    with run.batches() as loader:
        for step, sequences in loader:
            due = run.checkpoints.due(step)
            if due != "nothing" or step == last:
                run.checkpoint(step)
            else:
                run.checkpoints.copy(step)
            if due == "stop" and step < last:
                run.checkpoints.finish()
                run.stop(step)
            if step % run.recipe.evaluation.every_steps == 0 or step == last:
                run.evaluate(step)
            if step == last:
                run.checkpoints.finish()
                return step
            run.tracer.begin(step)
            with run.step_span(step):
                run.write_row(step, run.train(step, sequences), loader.idle_s)
            run.records.enter("data", step + 1)
    raise AssertionError("the loader has no end")
