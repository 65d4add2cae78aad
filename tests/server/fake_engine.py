"""An engine without a model: it commits the tokens of a fixed text, so that tests know every reply."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

from checkpoints import read_tokenizer
from secondguess.builtin import builtin_paths
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.source import FolderSource
from secondguess.core import Commit, Row, TokenLogprob
from secondguess.engine import (
    DrainingError,
    EngineStatus,
    Failed,
    Finished,
    NewPiece,
    Output,
    QueueFullError,
    Request,
)
from secondguess.errors import BadInputError
from secondguess.sampling.text import StreamingDetokenizer
from secondguess.stats import Stats

REPLY = "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n"
CONTEXT = 2048
LOGPROB = -0.25
QUEUE_SECONDS = 0.5


def fake_target(tokenizer=None, name="builtin", context=CONTEXT):
    """Return the parts of a loaded model that the server needs; by default the tokenizer of the built-in one."""
    path = str(builtin_paths().target)
    tokenizer = tokenizer or read_tokenizer(path)
    runtime = SimpleNamespace(
        context_length=context,
        vocab_size=len(tokenizer),
        num_input_tokens=len(tokenizer),
        takes_images=False,
    )
    checkpoint = SimpleNamespace(name=name, source=FolderSource(Path(path)) if name == "builtin" else None)
    return LoadedModel(checkpoint, runtime, tokenizer, frozenset([tokenizer.eos_token_id or 0]))


class FakeEngine:
    """Commits `reply` in rounds of `round_size` tokens, of which all but the last were drafted.

    Args:
        target: gives the tokenizer.
        reply: the text of every sample, which ends with an end token.
        keeps_special: the reply's special tokens are tokens, not text.
    """

    def __init__(self, target=None, reply=REPLY, round_size=3, pause=0.0):
        self.llm = SimpleNamespace(target=target or fake_target(), cache_bytes=0)
        self.reply, self.round_size, self.pause = reply, round_size, pause
        self.totals = Stats()
        self.requests: list[Request] = []
        self.is_full = self.is_draining = False
        self.failure: Exception | None = None
        self.end_reason = None
        self.is_cut = False
        self.hold_after = None
        """Number of rounds after which a request waits until it is cancelled."""

    def submit(self, request: Request) -> None:
        if self.is_draining:
            raise DrainingError("expected a running engine, got one that drains")
        if self.is_full:
            raise QueueFullError(4, retry_after=3.0)
        target = self.llm.target
        for prompt in request.prompts:
            if len(prompt) >= target.runtime.context_length:
                raise BadInputError("expected a shorter prompt")
        request.params.check_vocab(target.runtime.vocab_size)
        self.requests.append(request)
        threading.Thread(target=self._run, args=(request,), daemon=True).start()

    def status(self):
        return EngineStatus(1, 2, 3, self.is_draining)

    def cache_usage(self):
        return 0.25

    def drain(self, seconds):
        self.is_draining = True

    def close(self):
        self.is_draining = True

    @property
    def last(self) -> Request:
        return self.requests[-1]

    @property
    def last_prompt(self):
        return self.last.prompts[0]

    def _run(self, request):
        if self.failure is not None:
            request.receive(Failed(self.failure))
            return
        samples = [
            self._sample(request, prompt, index)
            for prompt in request.prompts
            for index in range(request.params.n)
        ]
        rounds = 0
        while any(not row.finished for row, *_ in samples) and not request.is_cancelled:
            if self.hold_after is not None and rounds >= self.hold_after:
                time.sleep(0.002)
                continue
            for index, sample in enumerate(samples):
                if not sample[0].finished:
                    request.receive(self._round(index, *sample))
            rounds += 1
            time.sleep(self.pause)
        request.receive(Finished([self._output(*sample) for sample in samples], QUEUE_SECONDS))

    def _sample(self, request, prompt, index):
        target, params = self.llm.target, request.params
        tokenizer = target.tokenizer
        detokenizer = StreamingDetokenizer(
            tokenizer, prompt, params.stop, params.min_tokens, params.include_stop_str_in_output
        )
        ends = target.end_tokens | frozenset(request.params.stop_token_ids)
        context = target.runtime.context_length
        row = Row(list(prompt), request.params, 0, index, False, ends, context, detokenizer.stop_checker)
        if not request.params.max_tokens:
            row.commit_nothing()
        left = tokenizer(self.reply, add_special_tokens=False).input_ids
        return row, detokenizer, [], [], [*left, min(target.end_tokens)], Stats()

    def _round(self, index, row, detokenizer, pieces, logprobs, left, stats):
        now, left[:] = left[: self.round_size], left[self.round_size :]
        commit = row.commit(now[:-1], now[-1])
        for each in (stats, self.totals):
            each.count(len(now) - 1, len(now) - 1, commit)
        found = self._logprobs(row, commit)
        logprobs += found
        pieces.append(detokenizer.take(commit))
        return NewPiece(index, pieces[-1], found)

    def _logprobs(self, row: Row, commit: Commit):
        number = row.params.logprobs
        if number is None:
            return []
        names = self.llm.target.tokenizer
        others = {token: LOGPROB - token for token in range(number)}
        texts = {token: names.decode([token]) for token in others}
        return [TokenLogprob(token, LOGPROB, others, names.decode([token]), texts) for token in commit.tokens]

    def _output(self, row, detokenizer, pieces, logprobs, left, stats):
        if not row.finished:
            pieces.append(detokenizer.flush(row.output))
        text = "".join(piece.text for piece in pieces)
        drafted = [flag for piece in pieces for flag in piece.drafted]
        reason = None if self.is_cut else self.end_reason or row.finish_reason
        return Output(text, row.output, drafted, reason, "lossless", stats, logprobs, row.sample_index)
