"""Prometheus metrics: vLLM's names where it has one, so that its dashboards work, else our own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from secondguess.engine import Failed, Finished, NewPiece
from secondguess.server.sleep import ServerEngine
from secondguess.stats import Stats

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
FamilyT = TypeVar("FamilyT", CounterMetricFamily, GaugeMetricFamily)
DRAFT_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)


class Metrics:
    """Metrics of one application, with a registry of their own."""

    def __init__(self, engine: ServerEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.registry.register(_EngineMetrics(engine, model))
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were in the KV cache."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.")
        self.requests = self._counter(
            "vllm:request_success", "Samples that ended, by reason.", "finished_reason"
        )
        self.http_requests = self._counter("secondguess:http_requests", "HTTP requests.", "route", "status")
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From submission to admission of a request."
        )
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From receipt to the first token."
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of a sample."
        )
        self.request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From receipt to the last token."
        )
        self.tokens_per_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS
        )
        self.tokens_per_output = self._histogram(
            "vllm:request_generation_tokens", "Output tokens per sample.", TOKEN_BUCKETS
        )

    def to_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        """Return a counter, or with further labels a function from their values to a counter."""
        counter = Counter(name, text, ("model_name", *labels), registry=self.registry)
        return partial(counter.labels, self._model) if labels else counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Any:
        histogram = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)


class _EngineMetrics(Collector):
    """State and counters of the engine at the time of a scrape."""

    def __init__(self, engine: ServerEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        usage = self._engine.cache_usage()
        for name, text, value in (
            ("vllm:num_requests_running", "Samples that are prefilled or decode.", status.num_running),
            ("vllm:num_requests_waiting", "Samples in the queue.", status.num_waiting),
            ("secondguess:num_requests", "Requests that are not finished.", status.num_requests),
            ("vllm:kv_cache_usage_perc", "Used share of the KV cache; 1 is all that memory allows.", usage),
        ):
            yield self._filled(GaugeMetricFamily(name, text, labels=("model_name",)), {"": value})
        states = {"awake": not status.is_asleep, "discard_all": status.is_asleep}
        text = "1 for the present state: awake, or with discarded weights."
        yield self._filled(
            GaugeMetricFamily("vllm:engine_sleep_state", text, labels=("model_name", "sleep_state")), states
        )
        yield from self._of_rounds(self._engine.totals)

    def _of_rounds(self, totals: Stats) -> Iterator[Metric]:
        """Yield the counters of all rounds so far, which grow with each round of a running request."""
        drafted, accepted = totals.drafted_per_position, totals.accepted_per_position
        for name, text, value in (
            ("secondguess:rounds", "Target passes, counted per sample.", totals.num_rounds),
            ("vllm:spec_decode_num_drafts", "Rounds with a draft.", drafted[0] if drafted else 0),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens.", totals.num_drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", totals.num_accepted),
        ):
            yield self._filled(CounterMetricFamily(name, text, labels=("model_name",)), {"": value})
        for name, text, label, values in (
            (
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position.",
                "position",
                dict(enumerate(accepted)),
            ),
            (
                "secondguess:drafted_tokens_per_pos",
                "Rounds with a draft token at a position.",
                "position",
                dict(enumerate(drafted)),
            ),
            ("secondguess:phase_seconds", "Time per phase, per sample.", "phase", dict(totals.seconds)),
        ):
            yield self._filled(CounterMetricFamily(name, text, labels=("model_name", label)), values)
        num_up_to = [totals.num_rounds - longer for longer in (*drafted, 0)]  # by draft length
        buckets = [
            (str(float(length)), num_up_to[min(length, len(drafted))]) for length in DRAFT_LENGTH_BUCKETS
        ]
        lengths = HistogramMetricFamily(
            "secondguess:draft_length", "Draft length per round.", labels=("model_name",)
        )
        lengths.add_metric([self._model], [*buckets, ("+Inf", totals.num_rounds)], sum(drafted))
        yield lengths

    def _filled(self, family: FamilyT, values: Mapping[Any, float]) -> FamilyT:
        """Return a family with these values, by the value of its second label if it has one."""
        for label, value in values.items():
            family.add_metric([self._model, str(label)] if label != "" else [self._model], value)
        return family


ABORTED = "abort"
"""Reason of requests that were cancelled, in the words of vLLM."""
FAILED = "error"
"""Reason of requests that ended with an error, in the words of vLLM."""


class Observer:
    """Measurements of one HTTP request, which was received when this is made."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.start = time.monotonic()
        self._last: dict[int, float] = {}

    def on_piece(self, event: NewPiece) -> None:
        """Count the tokens of a piece; several tokens of one round share the time since the last."""
        count = len(event.piece.tokens)
        if not count:
            return
        now = time.monotonic()
        if not self._last:
            self._metrics.time_to_first_token.observe(now - self.start)
        if (before := self._last.get(event.index)) is not None:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - before) / count)
        self._last[event.index] = now
        self._metrics.generation_tokens.inc(count)

    def on_prompt(self, num_tokens: int) -> None:
        """Count a prompt."""
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.tokens_per_prompt.observe(num_tokens)

    def on_end(self, event: Finished | Failed, num_samples: int) -> None:
        """Count the samples of a request that has ended; one that was cancelled is no measurement."""
        if isinstance(event, Failed):
            self._metrics.requests(FAILED).inc(num_samples)
            return
        for output in event.outputs:
            self._metrics.requests(output.finish_reason or ABORTED).inc()
        if any(output.finish_reason is None for output in event.outputs):
            return
        self._metrics.queue_time.observe(event.queue_seconds)
        self._metrics.request_latency.observe(time.monotonic() - self.start)
        for output in event.outputs:
            self._metrics.tokens_per_output.observe(len(output.token_ids))
            if output.index == 0:  # the samples of a prompt share what was in the cache
                self._metrics.cached_tokens.inc(output.stats.num_reused)


def speculative_decoding(stats: Stats) -> dict[str, Any]:
    """Return a sample's statistics under the names of vLLM's `metrics.speculative_decoding`.

    `acceptance_histogram[j]` is the number of rounds with a draft of which `j` tokens were accepted.
    """
    drafted = stats.drafted_per_position
    num_drafts = drafted[0] if drafted else 0
    accepted = (stats.accepted_per_position + [0] * len(drafted))[: len(drafted)]
    reached = [num_drafts, *accepted, 0]
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / num_drafts if num_drafts else None,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)] if num_drafts else [],
        "num_spec_steps": num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": len(drafted),
    }
