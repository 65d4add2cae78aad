"""Stream text and colour it by origin: green for accepted draft tokens, plain for those that the target sampled."""

import secondguess

llm = secondguess.load()
for piece in llm.stream("def is_prime(number):\n", max_tokens=80):
    for text, drafted in piece.segments:
        print(f"\033[32m{text}\033[0m" if drafted else text, end="", flush=True)
print()
