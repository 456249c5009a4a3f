"""Conversations as a user of vLLM writes them: one, several, with tools, with a template of one's own, and rendered by hand."""

import sys

from tandem import LLM, SamplingParams

llm = LLM(model=sys.argv[1])
sampling_params = SamplingParams(temperature=0, max_tokens=6)
conversation = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "the quick"},
    {"role": "assistant", "content": "brown fox"},
    {"role": "user", "content": "over the"},
]
tools = [{"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "properties": {"over": {"type": "string"}}}}}]
template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}"

outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
outputs += llm.chat([conversation, conversation[:2]], sampling_params=sampling_params)
outputs += llm.chat(conversation, sampling_params, tools=tools, chat_template=template, add_generation_prompt=False)
tokenizer = llm.get_tokenizer()
outputs += llm.generate({"prompt_token_ids": tokenizer.encode("lazy dog")}, sampling_params)
for output in outputs:
    print(f"{output.prompt!r} {output.outputs[0].text!r}")
