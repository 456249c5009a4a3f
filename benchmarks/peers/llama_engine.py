"""llama.cpp's side of the engine benchmark: ``llama_engine.py MODEL.gguf THREADS SEQUENCES``, with the ``generate`` of
``serve.py``: prompts in one batch, then one batch for each token, drawn by llama.cpp's own samplers (temperature and
distribution, or greedy). Through the C interface of ``llama-cpp-python``, since its ``Llama`` class decodes one sequence."""

import sys

import llama_cpp as C
from serve import serve


def main() -> None:
    threads, sequences = int(sys.argv[2]), int(sys.argv[3])
    C.llama_backend_init()
    model = C.llama_model_load_from_file(sys.argv[1].encode(), C.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {sys.argv[1]}")
    vocabulary = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    settings = C.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 512 * sequences, 512, 512, sequences
    settings.n_threads = settings.n_threads_batch = threads
    context = C.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context")
    batch = C.llama_batch_init(512, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted), 512 at a time."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if C.llama_decode(context, batch):
            sys.exit("llama.cpp failed to decode a batch")

    def generate(prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        samplers = []
        for seed in range(len(prompts)):
            chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
            if temperature:
                C.llama_sampler_chain_add(chain, C.llama_sampler_init_temp(temperature))
                C.llama_sampler_chain_add(chain, C.llama_sampler_init_dist(seed))
            else:
                C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
            samplers.append(chain)
        C.llama_memory_clear(C.llama_get_memory(context), True)
        made: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(prompts), 512 // len(prompts[0])):
            part = list(enumerate(prompts))[first : first + 512 // len(prompts[0])]
            decode([(token, at, s, at == len(prompt) - 1) for s, prompt in part for at, token in enumerate(prompt)])
            for row, (s, prompt) in enumerate(part):
                made[s].append(C.llama_sampler_sample(samplers[s], context, (row + 1) * len(prompt) - 1))
        for _ in range(new - 1):
            decode([(made[s][-1], len(prompt) + len(made[s]) - 1, s, True) for s, prompt in enumerate(prompts)])
            for s in range(len(prompts)):
                made[s].append(C.llama_sampler_sample(samplers[s], context, s))
        for chain in samplers:
            C.llama_sampler_free(chain)
        return made

    serve(generate, vocabulary)


main()
