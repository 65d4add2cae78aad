"""Editor client: complete the line at the cursor with the server's `/v1/completions`.

Needs the package `openai`.

secondguess serve &                               # at another address, set SECONDGUESS_URL
python examples/code_completion.py FILE LINE      # or without arguments: this file, line 12
"""

import os
import sys
from pathlib import Path

from openai import APIConnectionError, OpenAI

path, line = (Path(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (Path(__file__), 12)
text = path.read_text().splitlines(keepends=True)
address = os.environ.get("SECONDGUESS_URL", "http://127.0.0.1:8000")
client = OpenAI(
    base_url=f"{address}/v1", api_key=os.environ.get("SECONDGUESS_API_KEY", "none"), max_retries=0
)
try:
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt="".join(text[:line]),
        max_tokens=64,
        temperature=0.0,
        stop=["\n\n"],
        stream=True,
        # What follows the cursor often repeats what is there: drafted from, and never trusted.
        extra_body={"prediction": {"type": "content", "content": "".join(text[line:])[:2000]}},
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()
except APIConnectionError:
    print(f"expected a server at {address}, got no answer; start one with: secondguess serve")
