"""Generation of outputs from prompts: rows, their text and their statistics."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from weakref import proxy

from secondguess.checkpoint import memory
from secondguess.checkpoint.codes import TokenCodes
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.core import Commit, DraftSource, FinishReason, Row, StopChecker, TokenLogprob
from secondguess.drafters import select_parts
from secondguess.drafters.row_sources import ForcedTokens, Prediction
from secondguess.engine.models import Models
from secondguess.engine.shared_batch import RowGroup
from secondguess.errors import BadInputError
from secondguess.params import Grammar
from secondguess.prompts import ExtendedPrompt, Prompt, encode_with_images
from secondguess.sampling import SamplingParams
from secondguess.sampling.grammar import GrammarMatcher, compiler_for
from secondguess.sampling.text import Piece, StreamingDetokenizer, text_of_token
from secondguess.stats import Stats
from secondguess.tensors import within_vocabulary
from secondguess.verifiers.base import Exactness, Verifier


@dataclass(frozen=True)
class Output:
    """Generated text of one sample of one prompt.

    Attributes:
        text: generated text without the prompt, cut at a stop string.
        token_ids: generated tokens, up to and including the one that ended the row.
        drafted: per token, True if the drafter proposed it.
        finish_reason: `stop` (an end token or a stop string), `length` (`max_tokens` tokens),
            `context` (the model's context is full) or `grammar` (the grammar left no token, so the text
            is incomplete); None if generation was interrupted.
        exactness: guarantee for the text: `lossless` or `drafter-invariant`.
        stats: counters and timings.
        logprobs: per token, if the request asks for them; else empty.
        index: index among the `n` samples of the prompt.
        prompt_logprobs: per token of the prompt from the second on, if the request asks for them; else empty.
            The samples of a prompt share them.
        stop_string: string of `stop` that has ended the text; empty if none has.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: FinishReason | None
    exactness: Exactness
    stats: Stats
    logprobs: list[TokenLogprob]
    index: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stop_string: str = ""


@dataclass(frozen=True)
class NewPiece:
    """Text that one round adds to the sample with this index in its call, with the log-probabilities asked for."""

    index: int
    piece: Piece
    logprobs: list[TokenLogprob]


@dataclass
class _Sample:
    """One row with its text so far."""

    index: int
    row: Row
    first: Row
    """Row of the first sample of the prompt, which has the prompt's log-probabilities."""
    detokenizer: StreamingDetokenizer
    pieces: list[Piece] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_open: bool = True  # False once the pieces are complete


class Generation:
    """Decoding of a batch of prompts.

    Iterate for `(row index, piece)`, then call `outputs()`. The samples of all prompts decode
    together: one row for each of the `n` samples of the first prompt, then those of the second,
    and so on. Rows that do not fit into memory with the others, or with those of other calls, join
    when a row has finished.
    `generate`, `stream` and the command line all use this class. After an interruption, `outputs()`
    returns the text committed so far.

    Args:
        llm: the models.
        prompts: the prompts.
        params: settings of each prompt.
        owner: whose outputs the rows may draft from, if the `LLM` shares them: an API key, for
            instance.
    """

    def __init__(
        self, llm: Models, prompts: Sequence[Prompt], params: Sequence[SamplingParams], owner: str = ""
    ) -> None:
        self._llm = llm
        self._samples: dict[Row, _Sample] = {}
        if len(prompts) != len(params):
            raise BadInputError(
                f"expected sampling settings for each of {len(prompts)} prompts, got {len(params)}; give one per prompt"
            )
        for prompt, settings in zip(prompts, params, strict=True):
            self._add_samples(prompt, settings, owner)
        # A bound method would form a cycle, which keeps the models in memory until it is collected.
        receive = partial(Generation._receive, proxy(self))
        self.group = RowGroup(list(self._samples), receive, is_eager=False)
        target = llm.shared_batch.components.target
        sizes = {(len(lengths), max(lengths)) for lengths in map(target.slot_lengths, self._samples)}
        num_new = max([llm.target.runtime.num_tokens_to_allocate(*size) for size in sizes], default=0)
        memory.check_cache_memory(num_new, llm.cache_bytes, llm.target.runtime.device)

    def _add_samples(self, prompt: Prompt, params: SamplingParams, owner: str) -> None:
        """Add a row for each sample of a prompt."""
        llm = self._llm
        ids, images = encode_with_images(
            llm.target, prompt.prompt if isinstance(prompt, ExtendedPrompt) else prompt
        )
        if isinstance(params.prediction, str):  # tokenized once for all samples
            params = replace(params, prediction=tuple(_prediction_tokens(llm.target, params.prediction)))
        if params.prompt_logprobs is not None and images is not None:
            raise BadInputError(
                "expected prompt_logprobs only with a prompt of text, got one with images; leave it out"
            )
        rows: list[Row] = []
        for sample in range(params.n):
            detokenizer = StreamingDetokenizer(
                llm.target.tokenizer, ids, params.stop, params.min_tokens, params.include_stop_str_in_output
            )
            row = make_row(
                llm.target,
                llm.verifier,
                ids,
                params,
                detokenizer.stop_checker,
                sample,
                llm.drafter.draws_by_race,
            )
            row.images = images
            if params.draft_with is not None:
                row.parts, sources = select_parts(llm.drafter, params.draft_with)
                row.sources += sources
            if llm.share_history and may_share(llm.verifier, row):
                row.history = owner
            rows.append(row)
            self._samples[row] = _Sample(len(self._samples), row, rows[0], detokenizer)
        if params.prompt_logprobs is not None:
            rows[0].prompt_logprobs = []
        if isinstance(prompt, ExtendedPrompt):
            prompt.prepare(llm, rows)

    def run(self) -> list[Output]:
        """Decode all rows until they finish and return the outputs."""
        self.group.is_eager = True
        self.group.receive = partial(Generation._receive_tokens, proxy(self))
        for _ in self.rounds():
            pass
        outputs, tokenizer = self.outputs(), self._llm.target.tokenizer
        of_prompts = {id(output.prompt_logprobs): output.prompt_logprobs for output in outputs}
        texts = {key: [with_texts(token, tokenizer) for token in known] for key, known in of_prompts.items()}
        return [replace(output, prompt_logprobs=texts[id(output.prompt_logprobs)]) for output in outputs]

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        for pieces in self.rounds():
            yield from pieces

    def rounds(self) -> Iterator[list[tuple[int, Piece]]]:
        """Yield the pieces of each round.

        Rows, caches and texts are consistent between rounds: to stop early, stop iterating.
        """
        shared = self._llm.shared_batch
        try:
            shared.submit(self.group)
            while (pieces := shared.take(self.group)) is not None:
                yield [(new.index, new.piece) for new in pieces]
        finally:
            shared.cancel(self.group)

    def _receive_tokens(self, commits: Sequence[Commit]) -> list[NewPiece]:
        """Receive commits whose text is decoded at the end.

        Decoding it in every round would cost 0.1 ms, because the forward pass evicts the code from
        the CPU caches.
        """
        for commit in commits:
            sample = self._samples[commit.row]
            sample.drafted += commit.drafted
            sample.logprobs += [with_texts(token, self._llm.target.tokenizer) for token in commit.logprobs]
        return []

    def _receive(self, commits: Sequence[Commit]) -> list[NewPiece]:
        self._receive_tokens(commits)
        pieces = []
        for commit in commits:
            if not commit.tokens:  # of a row that was only scored
                continue
            sample = self._samples[commit.row]
            piece = sample.detokenizer.take(commit)
            sample.pieces.append(piece)
            sample.is_open = not commit.row.finished
            logprobs = sample.logprobs[-len(commit.tokens) :] if commit.logprobs else []
            pieces.append(NewPiece(sample.index, piece, logprobs))
        return pieces

    def flush(self) -> list[tuple[int, Piece]]:
        """Return the text of all rows that no round has returned, once.

        That of a row that has ended ends before its stop string.
        """
        held = []
        for row, sample in self._samples.items():
            if sample.is_open:
                sample.pieces.append(sample.detokenizer.flush(row.output, row.finish_reason))
                sample.is_open = not row.finished
                held.append((sample.index, sample.pieces[-1]))
        return held

    def outputs(self) -> list[Output]:
        """Return one output per row, in order; the log-probabilities of prompts, which may be long, have no texts."""
        self.flush()
        return [
            Output(
                text="".join(piece.text for piece in sample.pieces),
                token_ids=sample.row.output,
                drafted=list(sample.drafted),
                finish_reason=sample.row.finish_reason,
                exactness=self._llm.verifier.guarantee(sample.row),
                stats=self._llm.shared_batch.components.recorder.of(sample.row),
                logprobs=list(sample.logprobs),
                index=sample.row.sample_index,
                prompt_logprobs=sample.first.prompt_logprobs or [],
                stop_string=sample.detokenizer.stop_string,
            )
            for sample in self._samples.values()
        ]


def with_texts(logprob: TokenLogprob, tokenizer: Any) -> TokenLogprob:
    """Return a log-probability with the texts of the token and of its alternatives."""
    alternative_texts = {token: text_of_token(tokenizer, token) for token in logprob.alternatives}
    text = text_of_token(tokenizer, logprob.token)
    return replace(logprob, text=text, alternative_texts=alternative_texts)


def check_request(
    target: LoadedModel, verifier: Verifier, ids: Sequence[int], params: SamplingParams
) -> GrammarMatcher | None:
    """Refuse a request that cannot be decoded, before any work is done.

    Returns:
        Matcher at the beginning of the request's grammar; None without one.

    Raises:
        BadInputError: a prompt that leaves no free position in the model's context, settings with
            token ids outside its vocabulary, an invalid grammar, or settings that the verifier does
            not support.
    """
    context = target.runtime.context_length
    room = context - min(1, params.max_tokens)
    if len(ids) > room:
        reserved = " and one position must stay free" if room < context else ""
        raise BadInputError(
            f"expected a prompt of at most {room} tokens (the model's context is {context}{reserved}), "
            f"got {len(ids)}; shorten it"
        )
    params.check_vocab(target.runtime.vocab_size)
    if params.stop and isinstance(target.tokenizer, TokenCodes):
        raise BadInputError(
            f"expected no stop strings for {target.name}, whose tokens have no text, got {params.stop[0]!r:.40}; "
            "give stop_token_ids or max_tokens"
        )
    verifier.check(params)
    if params.grammar is None:
        return None
    compiler = compiler_for(target.tokenizer, target.runtime.vocab_size, target.end_tokens)
    return compiler.matcher(Grammar.parse(params.grammar))


def may_share(verifier: Verifier, row: Row) -> bool:
    """Return whether a row may draft from the outputs of earlier requests.

    False for a seeded row whose text depends on its drafts: it would then depend on earlier requests.
    """
    depends_on_drafts = row.params.temperature > 0 and verifier.guarantee(row) != Exactness.DRAFTER_INVARIANT
    return row.params.history and not (row.params.seed is not None and depends_on_drafts)


def make_row(
    target: LoadedModel,
    verifier: Verifier,
    ids: list[int],
    params: SamplingParams,
    stop_checker: StopChecker | None = None,
    sample: int = 0,
    draws_by_race: bool = False,
) -> Row:
    """Return the row of one sample of a prompt, after `check_request`; without a seed, random bits key its noise.

    `draws_by_race` is that of the drafter.
    """
    grammar = check_request(target, verifier, ids, params)
    params = _first_equal(params)
    # A grammar keeps them: where it leaves no token to go on with, they end the text.
    model_ends = frozenset() if params.ignore_eos and grammar is None else target.end_tokens
    sources: list[DraftSource] = [] if grammar is None else [ForcedTokens(grammar)]
    if params.prediction is not None:
        sources.append(Prediction(_prediction_tokens(target, params.prediction)))
    return Row(
        tokens=list(ids),
        params=params,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        sample_index=sample,
        coupled=verifier.uses_coupling(params.seed is not None, draws_by_race),
        end_tokens=model_ends | frozenset(params.stop_token_ids),
        context_length=target.runtime.context_length,
        stop_checker=stop_checker,
        grammar=grammar,
        sources=tuple(sources),
    )


@lru_cache(maxsize=256)
def _first_equal(params: SamplingParams) -> SamplingParams:
    """Return the first of equal settings, which every step looks up: equal ones are compared field by field."""
    return params


def _prediction_tokens(target: LoadedModel, prediction: str | Sequence[int]) -> Sequence[int]:
    """Return the tokens of a prediction, up to the first one that the model does not have."""
    if not isinstance(prediction, str):
        return prediction
    ids: list[int] = target.tokenizer(prediction, add_special_tokens=False, verbose=False).input_ids
    return within_vocabulary(ids, target.runtime.vocab_size)
