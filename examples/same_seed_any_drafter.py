"""With a seed the text depends on the seed alone, not on the drafter, the draft length or the batch."""

import secondguess

prompt = "def fibonacci(n):"
texts = {}
for drafter in ("none", "model:builtin-draft", "ngram", "suffix"):
    # float32 holds everywhere; bfloat16 does on a CPU, while on a GPU a near-tie may fall the other way
    llm = secondguess.load(drafter=drafter, dtype="float32")
    output = llm.generate(prompt, max_tokens=60, temperature=1.0, seed=7)
    texts[drafter] = output.text
    print(f"{drafter:22} {output.exactness}: {output.stats}")
assert len(set(texts.values())) == 1
print(prompt + texts["none"])
