"""Generation of outputs from prompts: rows, their text and their statistics."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.memory import check_cache_memory
from secondguess.core import Commit, FinishReason, Row, TokenLogprob
from secondguess.decode import Components, decode
from secondguess.errors import BadInputError
from secondguess.prompts import Prompt, encode
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats, StatsRecorder
from secondguess.text import Piece, StreamingDetokenizer, text_of_token
from secondguess.verifiers.base import Exactness, Verifier

if TYPE_CHECKING:
    from secondguess.api import LLM


@dataclass(frozen=True)
class Output:
    """Generated text of one sample of one prompt.

    Args:
        text: generated text without the prompt, cut before a stop string.
        token_ids: generated tokens, up to and including the one that ended the row.
        drafted: per token, True if the drafter proposed it.
        finish_reason: `stop` (an end token or a stop string), `length` (`max_tokens` tokens) or
            `context` (the model's context is full); None if generation was interrupted.
        exactness: guarantee for the text: `lossless`, `drafter-invariant` or `lossy`.
        stats: counters and timings.
        logprobs: per token, if the request asks for them; else empty.
        index: index among the `n` samples of the prompt.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: FinishReason | None
    exactness: Exactness
    stats: Stats
    logprobs: list[TokenLogprob]
    index: int = 0


class Generation:
    """Decoding of a batch of prompts.

    Iterate for `(row index, piece)`, then call `outputs()`. The samples of all prompts decode as
    one batch: one row for each of the `n` samples of the first prompt, then those of the second,
    and so on. `generate`, `stream` and the command line all use this class. After an interruption,
    `outputs()` returns the text committed so far.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        self._llm = llm
        self._ledger = StatsRecorder()
        self._texts: list[StreamingDetokenizer] = []
        self._rows: list[Row] = []
        self._commits: list[list[Commit]] = []
        self._pieces: list[list[Piece]] = []
        if len(prompts) != len(params):
            raise BadInputError(
                f"expected sampling settings for each of {len(prompts)} prompts, got {len(params)}; give one per prompt"
            )
        for prompt, settings in zip(prompts, params, strict=True):
            ids = encode(llm.target, prompt)
            for sample in range(settings.n):
                stop_checker = StreamingDetokenizer(llm.target.tokenizer, ids, stop=settings.stop)
                self._rows.append(make_row(llm.target, llm.verifier, ids, settings, stop_checker, sample))
                self._texts.append(stop_checker)
                self._commits.append([])
                self._pieces.append([])
        longest = max((len(row.tokens) for row in self._rows), default=0)
        num_new = llm.target.runtime.cache.num_tokens_to_allocate(len(self._rows), longest)
        check_cache_memory(num_new, llm.cache_bytes, llm.target.runtime.device)

    def run(self) -> list[Output]:
        """Decode all rows until they finish and return the outputs."""
        for _ in self.rounds():
            pass
        return self.outputs()

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        for pieces in self.rounds():
            yield from pieces

    def rounds(self) -> Iterator[list[tuple[int, Piece]]]:
        """Yield the pieces of each round.

        Rows, caches and texts are consistent between rounds: to stop early, stop iterating.
        """
        llm = self._llm
        components = Components(llm.target.runtime, llm.drafter, llm.verifier, llm.controller, self._ledger)
        index_of = {row: index for index, row in enumerate(self._rows)}
        loop = decode(components, self._rows)
        try:
            while (commits := llm.round_lock.run_round(loop)) is not None:
                yield [self._take(index_of[commit.row], commit) for commit in commits]
        finally:
            llm.round_lock.close(loop)

    def _take(self, index: int, commit: Commit) -> tuple[int, Piece]:
        self._commits[index].append(commit)
        piece = self._texts[index].take(commit)
        self._pieces[index].append(piece)
        return index, piece

    def flush(self) -> list[tuple[int, Piece]]:
        """Return, after an interruption, the text still held back for unfinished rows, once."""
        held = [
            (index, self._texts[index].flush()) for index, row in enumerate(self._rows) if not row.finished
        ]
        for index, piece in held:
            self._pieces[index].append(piece)
        return held

    def outputs(self) -> list[Output]:
        """Return one output per row, in order."""
        self.flush()
        return [self._output(index) for index in range(len(self._rows))]

    def _output(self, index: int) -> Output:
        row, commits = self._rows[index], self._commits[index]
        return Output(
            text="".join(piece.text for piece in self._pieces[index]),
            token_ids=row.output,
            drafted=[drafted for commit in commits for drafted in commit.drafted],
            finish_reason=row.finish_reason,
            exactness=self._llm.verifier.guarantee(row),
            stats=self._ledger.of(row),
            logprobs=[self._with_texts(each) for commit in commits for each in commit.logprobs],
            index=row.stream,
        )

    def _with_texts(self, logprob: TokenLogprob) -> TokenLogprob:
        tokenizer = self._llm.target.tokenizer
        alternative_texts = {token: text_of_token(tokenizer, token) for token in logprob.alternatives}
        text = text_of_token(tokenizer, logprob.token)
        return replace(logprob, text=text, alternative_texts=alternative_texts)


def check_request(
    target: LoadedModel, verifier: Verifier, ids: Sequence[int], params: SamplingParams
) -> None:
    """Refuse a request that cannot be decoded, before any work is done.

    Raises:
        BadInputError: a prompt that leaves no free position in the model's context, settings with
            token ids outside its vocabulary, or settings that the verifier does not support.
    """
    context = target.runtime.context_length
    if len(ids) >= context:
        raise BadInputError(
            f"expected a prompt of at most {context - 1} tokens (the model's context is {context} and one "
            f"place must stay free), got {len(ids)}; shorten it"
        )
    params.check_vocab(target.runtime.vocab_size)
    verifier.check(params)


def make_row(
    target: LoadedModel,
    verifier: Verifier,
    ids: list[int],
    params: SamplingParams,
    stop_checker: StreamingDetokenizer | None = None,
    sample: int = 0,
) -> Row:
    """Return the row of one sample of a prompt; without a seed, random bits key its noise.

    Raises:
        BadInputError: as in `check_request`.
    """
    check_request(target, verifier, ids, params)
    seeded = params.seed is not None
    return Row(
        tokens=list(ids),
        params=params,
        seed=params.seed if params.seed is not None else secrets.randbits(64),
        stream=sample,
        coupled=verifier.uses_coupling(seeded),
        end_tokens=target.end_tokens | frozenset(params.stop_token_ids),
        context_length=target.runtime.context_length,
        stop_checker=stop_checker,
    )
