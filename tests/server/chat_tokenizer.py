"""The built-in tokenizer with the chat format of Qwen: reasoning, tool calls, and a response template."""

from fake_engine import FakeEngine, fake_target

from checkpoints import read_tokenizer
from secondguess.builtin import builtin_paths

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if reasoning_effort == 'high' %}<think>{% endif %}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"},
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def chat_tokenizer(special=True):
    """Return the tokenizer; its delimiters are special tokens, or ordinary ones as in Qwen."""
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def chat_engine(reply, special=True):
    """Return an engine that replies in this format."""
    return FakeEngine(fake_target(chat_tokenizer(special), name="chatty"), reply)
