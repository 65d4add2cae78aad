"""Decode several prompts together, each with its own sampling settings; each text is what it would be alone."""

import secondguess
from secondguess import SamplingParams

llm = secondguess.load()
prompts = ["def add(a, b):", "class Stack:", "import json\n\ndef read(path):"]
params = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=40, temperature=0.7, repetition_penalty=1.1, stop=("\ndef ",), seed=2),
]
for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
    print(f"{prompt}{output.text}\n--- {output.finish_reason}: {output.stats}\n")
