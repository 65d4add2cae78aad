"""Call `model.generate` with speculative decoding as its `custom_generate`."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import secondguess
from secondguess.builtin import builtin_paths

path = builtin_paths().target
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("def greet(name):", return_tensors="pt", return_token_type_ids=False)

ids = model.generate(
    **inputs,
    max_new_tokens=40,
    do_sample=False,
    custom_generate=secondguess.custom_generate,
    drafter="model:builtin-draft",
)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
