"""Summarise search results. Summaries quote their sources, so suffix lookup drafts without a model."""

import secondguess

RESULTS = (
    "pathlib: Path.read_text() opens the file in text mode, reads it and closes the file.",
    "io: open() returns a file object; use it in a with statement, which closes the file.",
    "json: json.loads() parses a text; json.load() reads it from an open file.",
)
listing = "\n".join(f"# [{number}] {result}" for number, result in enumerate(RESULTS, start=1))
prompt = (
    f'"""How to read a JSON file.\n\nSources:\n{listing}\n\nSummary:\n# [1] pathlib: Path.read_text() opens'
)
settings = {"max_tokens": 96, "temperature": 0.0}

loaded = {name: secondguess.load(drafter=name) for name in ("none", "suffix")}
seconds = dict.fromkeys(loaded, 0.0)
for _ in range(3):  # in turns, so that a busy machine slows both alike
    for name, llm in loaded.items():
        output = llm.generate(prompt, **settings)
        seconds[name] += sum(output.stats.seconds.values())
print(output.text)
print(output.stats)
print(f"suffix lookup: {seconds['none'] / seconds['suffix']:.2f} times as fast as plain decoding")
