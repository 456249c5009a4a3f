"""What a person should know about a scored layout. Imports no torch."""

from tandem.planner.score import Score

GIB = 2**30


def warnings_of(score: Score) -> list[str]:
    """Returns a sentence for each thing that is wrong or doubtful about a layout."""
    layout, hardware, parallel = score.layout, score.hardware, score.layout.parallel
    found = []
    if not score.fits:
        found.append(
            f"it does not fit: {score.memory.total / GIB:.1f} GiB are needed on a GPU of {hardware.memory_bytes / GIB:.1f} GiB ({hardware.name})"
        )
    elif not score.fits_safely:
        found.append(f"{score.memory.total / GIB:.1f} of {hardware.memory_bytes / GIB:.1f} GiB are needed, within the error of the prediction: it may not fit")
    if parallel.tensor > hardware.gpus_per_node:
        found.append(f"tensor-parallel groups of {parallel.tensor} GPUs span nodes of {hardware.gpus_per_node}: every layer waits for the network")
    if parallel.pipeline > 1 and layout.micro_batches < parallel.pipeline:
        found.append(f"{layout.micro_batches} micro-batches do not fill a pipeline of {parallel.pipeline} stages")
    if parallel.virtual_stages > 1 and layout.micro_batches % parallel.pipeline:
        found.append(f"{layout.micro_batches} micro-batches are no multiple of --pp {parallel.pipeline}: the interleaved bubble is longer than (p - 1) / (v m)")
    stages = parallel.pipeline * parallel.virtual_stages
    if stages > 1 and score.shapes.num_hidden_layers % stages:
        found.append(f"{score.shapes.num_hidden_layers} layers do not divide over {stages} stages: the fullest one has {max(parallel.pipeline_layers)}")
    if layout.sequence > score.shapes.max_position_embeddings:
        found.append(f"sequences of {layout.sequence} tokens are longer than the model's context of {score.shapes.max_position_embeddings}")
    if parallel.zero and parallel.data * parallel.context == 1:
        found.append(f"--zero {parallel.zero} has one rank to shard over and changes nothing")
    return found
