"""Bytes that grow with the counts of a recipe or an engine: prompts, samples, workers, sequences. Imports no torch."""

from tandem.config.engine import EngineArgs
from tandem.estimate.model_bytes import state_bytes
from tandem.layout.shapes import ModelShapes

PROMPT_BYTES, SAMPLE_BYTES, SAMPLED_TOKEN_BYTES = 640, 1400, 130
"""Measured on task sort: a prompt of 6 tokens (56 tokens: 674), a sample with its score, and each of its tokens (id, two log-probabilities and the
version of the weights)."""
REWARD_WORKER_BYTES = 15 << 20
"""Measured: memory of a reward or tool worker with built-in functions that it shares with no other process. Functions of the user add to it."""
AGENT_WORKER_BYTES = 50 << 20
"""Measured: the same of an agent worker with the `openai` SDK."""
WORKER_FILES = 2
"""Descriptors that the owner of a worker holds for it: its socket and its process."""
ROW_BYTES = 120
"""Of a row of the input batch without its buffers of drawn tokens and its block table: numbers, and the row in the list of free ones."""
DRAWN_TOKEN_BYTES = 16
"""Of a row and each position of the context: a token id and two log-probabilities."""


def sampled_bytes(prompts: int, group_size: int, max_tokens: int) -> int:
    """Returns the bytes of ``prompts`` with ``group_size`` completions each, all of ``max_tokens`` tokens."""
    return prompts * (PROMPT_BYTES + group_size * (SAMPLE_BYTES + max_tokens * SAMPLED_TOKEN_BYTES))


def row_bytes(max_model_len: int) -> int:
    """Returns the bytes of a row of the engine's input batch, for a sequence of up to ``max_model_len`` tokens."""
    return ROW_BYTES + DRAWN_TOKEN_BYTES * max_model_len + max_model_len // 4


def draft_states(shapes: ModelShapes, engine: EngineArgs) -> int:
    """Returns how many states of linear attention an engine keeps for one step, one after each draft token, so that sequences go on after the last accepted
    one: at most as many as sequences run."""
    speculative = engine.speculative_config
    if shapes.linear_attention is None or speculative is None:
        return 0
    wanted = speculative.batch_limit(engine.device.partition(":")[0], engine.max_num_seqs) * speculative.draft_tokens
    return min(wanted, max(engine.max_num_seqs, speculative.draft_tokens))


def running_state_bytes(shapes: ModelShapes, engine: EngineArgs) -> int:
    """Returns the bytes of the states of linear attention of all sequences that run, and of those after draft tokens; 0 where no layer has any."""
    return (engine.max_num_seqs + draft_states(shapes, engine)) * state_bytes(shapes)


def lora_bytes(shapes: ModelShapes, args: EngineArgs) -> int:
    """Returns the bytes of ``max_loras`` adapters of ``max_lora_rank`` on every matrix of a layer, or every linear layer of a module of transformers."""
    if shapes.transformers is not None:
        sides = sum(sum(shapes.transformers.shape_of(f"{name}.weight")) for name in shapes.transformers.linears)
        return 4 * args.max_loras * (args.max_lora_rank * sides + 64)
    hidden, inner, layers = shapes.hidden_size, shapes.intermediate_size, range(shapes.num_hidden_layers)
    of_attention = sum(matrix.inputs + matrix.outputs for layer in layers for matrix in shapes.matrices_of_attention(layer))
    return 4 * args.max_loras * (args.max_lora_rank * (of_attention + len(layers) * 3 * (hidden + inner)) + 64)
