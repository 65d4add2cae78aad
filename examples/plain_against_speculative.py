"""Generate the same text with and without drafts, with the built-in pair, and print the speed-up."""

import sys

import secondguess

prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_lines(path):"
settings = {"max_tokens": 200, "temperature": 0.0}

speculative = secondguess.load()
plain = secondguess.load(drafter="none")
for llm in (plain, speculative):
    llm.generate(prompt, max_tokens=16)  # the first call of a process pays for warming up

rates: dict[str, list[float]] = {"plain": [], "speculative": []}
for _ in range(3):  # in turns, so that a busy machine slows both alike
    rates["plain"].append(plain.generate(prompt, **settings).stats.tokens_per_second)
    output = speculative.generate(prompt, **settings)
    rates["speculative"].append(output.stats.tokens_per_second)

print(prompt + output.text)
medians = {name: sorted(values)[1] for name, values in rates.items()}
print(f"\nplain {medians['plain']:.0f} tokens/s, speculative {medians['speculative']:.0f} tokens/s:", end=" ")
print(f"{medians['speculative'] / medians['plain']:.2f} times as fast")
print(output.stats)
