"""The output distribution over HTTP: 16 concurrent clients with all ways of drafting, against exact probabilities."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from conftest import serving
from secondguess import load
from secondguess.engine import Engine
from secondguess.proof.certificate import MIN_P_VALUE, g_test
from secondguess.sampling.text import text_of_token
from secondguess.server.settings import ServerSettings

NUM_CLIENTS, NUM_SAMPLES = 16, 64
NUM_REQUESTS = int(os.environ.get("SECONDGUESS_HTTP_REQUESTS", "96"))
"""1,024 requests give a certificate below 0.02, and 96 one below 0.066, but for one of 10,000 runs (simulated)."""
PROMPT, NUM_TOKENS, TOP_K = [5, 6, 7, 5, 6, 7, 5, 6], 2, 3
WAYS = (
    {},
    {"speculation": "off"},
    {"speculation": {"draft_length": 1}},
    {"speculation": {"draft_length": 4}},
    {"speculation": {"max_draft": 2}},
    {"speculation": {"drafter": "ngram", "draft_length": 2}},
    {"speculation": {"drafter": "model", "draft_length": 2}},
    {"prediction": {"type": "content", "content": "a b c"}},
)


def exact_probs(path: Path) -> dict[tuple[int, ...], float]:
    """Return the probability of every text, from forward passes of the unmodified module."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()

    def next_probs(tokens: list[int]) -> dict[int, float]:
        with torch.no_grad():
            values, found = model(torch.tensor([tokens])).logits[0, -1].double().topk(TOP_K)
        return dict(zip(found.tolist(), values.softmax(-1).tolist(), strict=True))

    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        probs = {
            (*text, token): prob * further
            for text, prob in probs.items()
            for token, further in next_probs([*PROMPT, *text]).items()
        }
    return probs


def sample(url: str, place: int) -> list[tuple[str, ...]]:
    """Return the tokens of the samples of one request."""
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "top_k": TOP_K,
        "n": NUM_SAMPLES,
        "logprobs": 0,
        **WAYS[place % len(WAYS)],
    }
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = json.loads(reply.read())
    assert reply.status == 200, content
    return [tuple(choice["logprobs"]["tokens"]) for choice in content["choices"]]


def test_samples_over_http_follow_the_exact_distribution(
    tiny_checkpoint: Path, tiny_draft_checkpoint: Path
) -> None:
    llm = load(tiny_checkpoint, f"suffix,min=1+model:{tiny_draft_checkpoint}", dtype="float32")
    engine = Engine(llm, max_waiting=NUM_CLIENTS * NUM_SAMPLES)
    with (
        serving(engine, ServerSettings(model_names=("tiny",))) as url,
        ThreadPoolExecutor(NUM_CLIENTS) as clients,
    ):
        found = clients.map(lambda place: sample(url, place), range(NUM_REQUESTS))
        counts = Counter(text for texts in found for text in texts)
    engine.close()
    expected: Counter[tuple[str, ...]] = Counter()
    for text, prob in exact_probs(tiny_checkpoint).items():
        expected[tuple(text_of_token(llm.target.tokenizer, token) for token in text)] += prob
    assert set(counts) <= set(expected)
    total, texts = counts.total(), list(expected)
    assert total == NUM_REQUESTS * NUM_SAMPLES
    assert g_test([counts[text] for text in texts], [total * expected[text] for text in texts]) > MIN_P_VALUE
    distance = sum(abs(counts[text] / total - expected[text]) for text in texts) / 2
    bound = distance + math.sqrt(math.log(1 / MIN_P_VALUE) / (2 * total))
    print(f"{total} samples: distance {distance:.4f}, certificate {bound:.4f}")
    assert bound < 0.02 * math.sqrt(1024 * NUM_SAMPLES / total)
