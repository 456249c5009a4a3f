"""Names of vLLM that Tandem does not have, each with what has its place, for messages; and what it spells otherwise."""

from collections.abc import Mapping
from typing import Any

SAMPLING = {
    "beam_width": "beam search is not implemented; ask for n samples and choose by cumulative_logprob",
    "do_sample": "temperature=0 is greedy, above 0 it samples",
    "early_stopping": "it belongs to beam search, which is not implemented; leave it out",
    "extra_args": "there are no custom samplers; leave it out",
    "flat_logprobs": "logprobs are lists of mappings; leave it out",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(json=...)",
    "guided_json": "use structured_outputs=StructuredOutputsParams(json=...)",
    "guided_regex": "use structured_outputs=StructuredOutputsParams(regex=...)",
    "guided_choice": "use structured_outputs=StructuredOutputsParams(choice=...)",
    "guided_grammar": "use structured_outputs=StructuredOutputsParams(grammar=...)",
    "length_penalty": "it belongs to beam search, which is not implemented; leave it out",
    "logits_processors": "functions on logits cannot be given; use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "logprob_token_ids": "use logprobs=-1, which returns the log-probability of every token",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, the number of new tokens",
    "max_new_tokens": "use max_tokens",
    "num_beams": "beam search is not implemented; ask for n samples and choose by cumulative_logprob",
    "num_return_sequences": "use n",
    "response_format": "use structured_outputs=StructuredOutputsParams(json=...)",
    "skip_reading_prefix_cache": "cached and computed prefixes have the same bits; leave it out, or turn the cache off with LLM(enable_prefix_caching=False)",
    "spaces_between_special_tokens": "special tokens are written as the tokenizer does; leave it out",
    "stop_strings": "use stop",
    "stream_interval": "streamed requests answer after every step; leave it out",
    "thinking_token_budget": "limit all new tokens with max_tokens",
    "use_beam_search": "beam search is not implemented; ask for n samples and choose by cumulative_logprob",
}
POOLING = {
    "extra_kwargs": "there are no custom poolers; leave it out",
    "late_interaction_params": "ask for token_embed and compare the vectors; leave it out",
    "normalize": "use use_activation",
    "softmax": "use use_activation",
    "returned_token_ids": "set classifier_from_token with hf_overrides of the LLM",
    "skip_reading_prefix_cache": "cached and computed prefixes have the same bits; leave it out",
    "step_tag_id": "ask for token_classify and choose among its results",
    "truncate_prompt_tokens": "give a prompt of fewer tokens: {'prompt_token_ids': [...]}",
}
STRUCTURED = {
    "backend": "llguidance is the only one; leave it out",
    "disable_additional_properties": "write \"additionalProperties\": false into the schema",
    "json_schema": "use json",
    "schema": "use json",
    "structural_tag": "use grammar or regex",
}
LORA = {
    "base_model_name": "the adapter is applied to the LLM's model; leave it out",
    "lora_local_path": "use lora_path",
    "load_inplace": "an adapter whose folder has changed is loaded again; leave it out",
    "long_lora_max_len": "leave it out",
    "tensorizer_config_dict": "give the folder of the adapter as lora_path",
}
_SPECULATION = "use speculative_config={'method': 'ngram'}, {'method': 'suffix'}, {'method': 'mtp'}, or 'draft' or 'eagle3' with 'model': FOLDER"
_SPLIT = "use tensor_parallel_size; an engine is not divided in another way"
_TEXT_ONLY = "the models take text alone; leave it out"
_CONFIG = "edit the config.json of the model's folder"
ENGINE = {
    "attention_backend": "use attention",
    "block_size": "a block has 16 tokens; leave it out",
    "calculate_kv_scales": "8-bit keys and values have a scale for each token and head; leave it out",
    "chat_template": "give it to llm.chat(messages, chat_template=...)",
    "compilation_config": "nothing is compiled; use enforce_eager=True to turn CUDA graphs off",
    "config_format": "a folder has config.json; leave it out",
    "cpu_offload_gb": "all weights stay on the device; use quantization='int8' where they do not fit",
    "data_parallel_size": "start several engines: 'tandem serve MODEL --instances N'",
    "disable_async_output_proc": "leave it out",
    "disable_cascade_attn": "leave it out",
    "disable_custom_all_reduce": "leave it out",
    "distributed_executor_backend": "ranks are processes of this machine; leave it out",
    "enable_expert_parallel": _SPLIT,
    "enable_sleep_mode": "llm.engine.sleep() and wake_up() always work; leave it out",
    "guided_decoding_backend": "structured output uses llguidance; leave it out",
    "hf_config_path": _CONFIG,
    "hf_token": "log in with 'hf auth login', or set HF_TOKEN",
    "kv_cache_memory_bytes": "use kv_cache_tokens, the size of the KV cache in tokens",
    "kv_transfer_config": "one engine computes prompts and completions; leave it out",
    "limit_mm_per_prompt": _TEXT_ONLY,
    "load_in_4bit": "use quantization='int4'",
    "load_in_8bit": "use quantization='int8'",
    "logits_processors": "functions on logits cannot be given; use logit_bias, allowed_token_ids, bad_words or structured_outputs of SamplingParams",
    "max_seq_len_to_capture": "CUDA graphs are captured for the lengths that occur; leave it out",
    "mm_processor_kwargs": _TEXT_ONLY,
    "num_gpu_blocks_override": "use kv_cache_tokens, the size of the KV cache in tokens",
    "num_speculative_tokens": _SPECULATION,
    "override_pooler_config": "use pooler_config",
    "pipeline_parallel_size": _SPLIT,
    "quantization_config": "use quantization; a quantized folder is recognised without it",
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "scheduling_policy": "requests are ordered by their priority; leave it out",
    "speculative_model": _SPECULATION,
    "structured_outputs_config": "structured output uses llguidance; leave it out",
    "task": "use runner='pooling' with convert='embed' or convert='classify'",
    "tokenizer_mode": "the tokenizer.json of the model's folder is used; leave it out",
    "tokenizer_revision": "give the folder of the tokenizer as tokenizer",
    "torch_dtype": "use dtype",
    "use_v2_block_manager": "leave it out",
    "worker_cls": "workers cannot be replaced; leave it out",
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (False, True),
    "disable_log_stats": (False, True),
    "enable_expert_parallel": (False,),
    "enable_sleep_mode": (False, True),
    "pipeline_parallel_size": (1,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
}
"""Options of vLLM's engine that change nothing here with these values."""
METHODS = {
    "apply_model": "the model is llm.engine.decoder",
    "beam_search": "beam search is not implemented; ask for n samples and choose by cumulative_logprob",
    "collective_rpc": "ranks are not called by users",
    "get_metrics": "use llm.engine.stats() and llm.engine.cumulative_stats()",
    "llm_engine": "use llm.engine",
    "reward": "use encode(prompts, pooling_task='classify'), or 'token_classify' for a score of each token",
    "set_tokenizer": "give LLM(tokenizer=...)",
    "sleep": "use llm.engine.sleep()",
    "start_profile": "use 'run.trace_steps' of a recipe, or a profiler of your own",
    "wake_up": "use llm.engine.wake_up()",
}
TOKENIZER = {
    "__call__": "use encode(text)",
    "apply_chat_template": "use llm.chat(messages), or llm.chat_prompt(messages) for the prompt alone",
    "batch_decode": "call decode(ids) for each",
    "convert_ids_to_tokens": "call decode([id]) for each",
    "eos_token_id": "use eos_token_ids; there can be several",
    "get_vocab": "use backend.get_vocab()",
    "tokenize": "use encode(text)",
}
"""Of a tokenizer of transformers."""
QUANTIZED_FOLDERS = ("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gptq", "gptq_marlin")
"""Values of vLLM's ``quantization`` that name the format of a folder."""
DTYPES = {"half": "float16", "float": "float32"}


_METHODS = {"draft_model": "draft", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "qwen3_next_mtp": "mtp"}
"""vLLM's names of methods of speculation that have another here."""


def with_method(speculative_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``speculative_config`` with its method, which vLLM infers from a model and calls ``draft_model``. One that has neither is returned as it is."""
    method = speculative_config.get("method", "draft" if "model" in speculative_config else None)
    return {**speculative_config, **({} if method is None else {"method": _METHODS.get(method, method) if isinstance(method, str) else method})}
