"""Chat in several turns. A turn prefills only what is new: the history is in the KV cache."""

import secondguess

TURNS = (
    "write a function that adds two numbers",
    "now one that multiplies them",
    "and one that divides, which checks the divisor",
)
SETTINGS = {"max_tokens": 64, "temperature": 0.7, "seed": 1, "stop": ("\n# User",)}

speeds = {}
for drafter in ("none", "suffix+model:builtin-draft"):
    llm = secondguess.load(drafter=drafter)
    llm.generate("def warm_up():", max_tokens=64)
    history, tokens, seconds = "", 0, 0.0
    for turn in TURNS:
        history += f"# User: {turn}\n"
        output = llm.generate(history, **SETTINGS)
        history += output.text
        tokens += output.stats.num_tokens
        seconds += sum(output.stats.seconds.values())
        print(f"{drafter}: prefill {output.stats.seconds['prefill'] * 1000:.0f} ms, {output.stats}")
    speeds[drafter] = tokens / seconds
print(history)
plain, speculative = speeds.values()
print(f"{plain:.0f} tokens/s plain, {speculative:.0f} speculative: {speculative / plain:.2f} times as fast")
