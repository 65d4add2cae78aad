"""What the README shows: `load()` once, then `generate()` or `stream()`.

Everything here is preparation and bookkeeping around `decode.decode`; no token is decided in this file.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath

import numpy
from torch import Tensor

from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.core import Commit, Row, TokenLogprob
from secondguess.decode import Team, decode
from secondguess.drafters import draft_model_paths, make_drafter
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.pairing import UnloadedTarget, require_model_to_quantize, understand_drafter
from secondguess.runtime.base import Runtime
from secondguess.runtime.loading import (
    LoadedModel,
    check_vocabularies,
    find_checkpoint,
    load_runtime,
    memory_need,
    pick_device,
    read_config,
)
from secondguess.runtime.memory import MemoryNeed, check_cache_memory, check_memory
from secondguess.sampling import SamplingParams
from secondguess.stats import Ledger, Stats
from secondguess.text import Piece, TextStream
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Exactness, Verifier

Prompt = str | Sequence[int] | numpy.ndarray | Tensor
"""Text, or token ids: a sequence of whole numbers, or an array or a tensor `[position]` of them."""

NO_DRAFTING = "fixed:0"
"""Controller of whoever never drafts."""

_ARRAYS = (numpy.ndarray, Tensor)


@dataclass(frozen=True)
class Output:
    """What one prompt gave.

    Args:
        text: the generated text, cut before a stop string; the prompt is not part of it.
        token_ids: the generated tokens, up to and including the one that ended the row.
        drafted: per token, whether the drafter wrote it.
        finish_reason: `stop` (an end token or a stop string) or `length`; None when the caller interrupted.
        exactness: what the text promises: `lossless`, `drafter-invariant` or `lossy`.
        stats: what it took.
        logprobs: per token, when the request asked for them.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str | None
    exactness: Exactness
    stats: Stats
    logprobs: list[TokenLogprob]


class LLM:
    """A target with a drafter, ready to generate. Made by `load`.

    Calls share the controller, which goes on learning from each of them what drafts cost and how many are accepted: later
    calls may draft otherwise, and are faster or slower for it; the law of the text stays.

    Args:
        target: the model whose law the text follows, its tokenizer, and what was decided while loading it.
        drafter: who guesses.
        verifier: who decides which guesses become text.
        controller: who says how far to draft.
        cache_bytes: what one token takes in the caches of all models; 0 leaves batches unchecked.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        cache_bytes: int = 0,
    ) -> None:
        self.cache_bytes = cache_bytes
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.controller = controller

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **settings: object
    ) -> Output | list[Output]:
        """Generate for one prompt (an `Output`) or for several (a list, decoded as one batch).

        Args:
            prompts: text, or token ids; a list of them makes a batch.
            params: sampling settings of every prompt; `settings` (`max_tokens=128, temperature=0.7, ...`, see
                `SamplingParams`) make or change them.

        Raises:
            BadInputError: what is neither text nor token ids, an empty prompt, one that fills the context, or
                a setting that makes no sense.
            OutOfMemoryError: the prompts' caches would not fit; nothing was allocated.
        """
        if is_single(prompts):
            return self.generate_batch([prompts], [self.sampling(params, **settings)])[0]  # type: ignore[list-item]
        batch: Sequence[Prompt] = prompts  # type: ignore[assignment]
        return self.generate_batch(batch, [self.sampling(params, **settings)] * len(batch))

    def generate_batch(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Output]:
        """Generate for prompts that each have their own settings, decoded as one batch.

        Args:
            prompts: text, or token ids; one or more.
            params: of each prompt, in the same order.

        Returns:
            One output per prompt, in order.

        Raises:
            BadInputError: as `generate`, or as many settings as prompts are not given.
            OutOfMemoryError: the prompts' caches would not fit; nothing was allocated.
        """
        generation = Generation(self, prompts, params)
        for _ in generation:
            pass
        return generation.outputs()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: object
    ) -> Iterator[Piece]:
        """Yield text as it is decided; each piece knows which of its tokens were drafted.

        Raises:
            BadInputError: as `generate`, and at once: not only when the first piece is asked for.
        """
        generation = Generation(self, [prompt], [self.sampling(params, **settings)])
        return (piece for _, piece in generation)

    @staticmethod
    def sampling(params: SamplingParams | None = None, **settings: object) -> SamplingParams:
        """Sampling settings from a base and changes to it.

        Raises:
            BadInputError: `params` of another type, an unknown name, or a value that makes no sense.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise BadInputError(
                f"expected params to be SamplingParams, got {type(params).__name__}; "
                "give single settings by name, such as max_tokens=64"
            )
        known = SamplingParams.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise BadInputError(f"unknown setting {name!r}; expected one of {', '.join(known)}")
        return replace(params or SamplingParams(), **settings)  # type: ignore[arg-type]


class Generation:
    """Prompts on their way to outputs: iterate for `(prompt index, piece)`, then ask for `outputs()`.

    The one consumer of the loop: `generate`, `stream` and the command line all drain this. After an
    interruption `outputs()` holds what was decided so far.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        self._llm = llm
        self._ledger = Ledger()
        self._texts: list[TextStream] = []
        self._rows: list[Row] = []
        self._commits: list[list[Commit]] = []
        self._pieces: list[list[Piece]] = []
        if len(prompts) != len(params):
            raise BadInputError(
                f"expected sampling settings for each of {len(prompts)} prompts, got {len(params)}; give one per prompt"
            )
        for prompt, settings in zip(prompts, params, strict=True):
            ids = encode(llm.target, prompt)
            watcher = TextStream(llm.target.tokenizer, ids, stop=settings.stop)
            self._rows.append(make_row(llm.target, llm.verifier, ids, settings, watcher))
            self._texts.append(watcher)
            self._commits.append([])
            self._pieces.append([])
        longest = max((len(row.tokens) for row in self._rows), default=0)
        num_new = llm.target.runtime.cache.num_to_allocate(len(self._rows), longest)
        check_cache_memory(num_new, llm.cache_bytes, llm.target.runtime.device)

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        for pieces in self.rounds():
            yield from pieces

    def rounds(self) -> Iterator[list[tuple[int, Piece]]]:
        """What each round gave; between rounds everything agrees, so that is where to stop early."""
        llm = self._llm
        team = Team(llm.target.runtime, llm.drafter, llm.verifier, llm.controller, self._ledger)
        index_of = {row: index for index, row in enumerate(self._rows)}
        for commits in decode(team, self._rows):
            yield [self._take(index_of[commit.row], commit) for commit in commits]

    def _take(self, index: int, commit: Commit) -> tuple[int, Piece]:
        self._commits[index].append(commit)
        piece = self._texts[index].take(commit)
        self._pieces[index].append(piece)
        return index, piece

    def flush(self) -> list[tuple[int, Piece]]:
        """After an interruption: the text that unfinished rows still held back, told once."""
        held = [
            (index, self._texts[index].flush()) for index, row in enumerate(self._rows) if not row.finished
        ]
        for index, piece in held:
            self._pieces[index].append(piece)
        return held

    def outputs(self) -> list[Output]:
        """One output per prompt, in order."""
        self.flush()
        return [self._output(index) for index in range(len(self._rows))]

    def _output(self, index: int) -> Output:
        row, commits = self._rows[index], self._commits[index]
        return Output(
            text="".join(piece.text for piece in self._pieces[index]),
            token_ids=row.output,
            drafted=[drafted for commit in commits for drafted in commit.drafted],
            finish_reason=row.finish_reason,
            exactness=self._llm.verifier.promise(row),
            stats=self._ledger.of(row),
            logprobs=[logprob for commit in commits for logprob in commit.logprobs],
        )


def load(
    model: str | PathLike[str] = "builtin",
    drafter: str | None = None,
    *,
    verifier: str = "auto",
    controller: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    drafter_quantize: str | None = None,
    runtime: str = "auto",
) -> LLM:
    """Load a target and its drafter.

    Args:
        model: a directory or a cached model's name; `builtin` is the target in the box.
        drafter: `none`, `model:PATH`, `ngram`, `suffix`, `early-exit[:PATH]`, `layer-skip:PATH`, `medusa[:PATH]`,
            `mtp[:PATH]`, `eagle[:PATH]`, `dspark[:PATH]` (see `docs/drafters.md`), each with `,key=value` options, or several
            joined by `+`, which take turns. Without a path it is what was shipped for the target. Without a name the
            built-in target gets `suffix` and its own draft model, any other model `suffix`, which needs nothing.
        verifier: `auto` (see `docs/verifiers.md`), `greedy`, `rejection`, `block`, `recursive`, `traversal` or
            `coupled`.
        controller: `cost` (the default), `fixed:K`, `confidence`, `entropy`, `learned`, with options (see `docs/controllers.md`).
        dtype: `auto` is bfloat16 where the processor multiplies it in hardware or our kernels run the model, else float32;
            or float64, float32, bfloat16, float16.
        device: `auto`, `cpu` or `cuda[:N]`.
        quantize: `int8` stores the target's weights in 8 bits (where our kernels do not run it,
            with `pip install secondguess[quant]`).
        drafter_quantize: the same for a draft model.
        runtime: `native` (compiled kernels; dense decoders in bfloat16 or 8 bits on a CPU), `fused` (the same with torch, in
            any dtype), `transformers` (the module itself), or `auto`: the first that covers a model and says what the
            module says. A draft model always gets `auto`.

    Raises:
        CheckpointError: a model that is missing, broken or cannot be decoded speculatively.
        BadInputError: a name or a value that does not exist, a controller that the drafter would not ask, or a verifier that
            cannot judge its drafts.
        OutOfMemoryError: both models and their caches would not fit.
    """
    model = fspath(model) if isinstance(model, PathLike) else model
    name = default_drafter(model) if drafter is None else drafter
    optional = {"controller": controller, "quantize": quantize, "drafter_quantize": drafter_quantize}
    given = {option: value for option, value in optional.items() if value is not None}
    _require_texts(
        model=model, drafter=name, verifier=verifier, dtype=dtype, device=device, runtime=runtime, **given
    )
    # Names are cheap to check, weights are not to load.
    draft_models_named = draft_model_paths(name)
    chosen_verifier = make_verifier(verifier)
    if controller is not None:
        make_controller(controller)
    needs = [memory_need(model, dtype=dtype, device=device, quantize=quantize, runtime=runtime)]
    needs += [
        memory_need(path, dtype=dtype, device=device, quantize=drafter_quantize, drafts=True)
        for path in draft_models_named
    ]
    head_bytes = understand_drafter(name, _unloaded(model, runtime)).head_bytes
    if head_bytes:
        needs.append(MemoryNeed(name, head_bytes, 0, needs[0].num_cached_tokens))
    check_memory(needs, pick_device(device))
    target = load_runtime(model, dtype=dtype, device=device, quantize=quantize, runtime=runtime)
    draft_models: list[LoadedModel] = []

    def load_draft_model(path: str) -> Runtime:
        loaded = load_runtime(path, dtype=dtype, device=device, quantize=drafter_quantize, drafts=True)
        check_vocabularies(target, loaded)
        draft_models.append(loaded)
        return loaded.runtime

    made = make_drafter(
        name,
        target_vocab_size=target.runtime.vocab_size,
        load_draft_model=load_draft_model,
        target=target,
    )
    check_verifier(chosen_verifier, made)
    chosen_controller = choose_controller(controller, made)
    require_model_to_quantize(drafter_quantize, made.name, bool(draft_models))
    cache_bytes = sum(map(_cached_bytes, [target, *draft_models]))
    return LLM(target, made, chosen_verifier, chosen_controller, cache_bytes)


def _unloaded(model: str, runtime: str) -> UnloadedTarget:
    """What can be asked of a target before it is loaded; whether its layers run apart is known for certain only then."""
    path = find_checkpoint(model)
    num_layers = read_config(path).get_text_config().num_hidden_layers
    return UnloadedTarget(model, path, num_layers, runs_layers_apart=runtime != "transformers")


def _cached_bytes(loaded: LoadedModel) -> int:
    """What a token takes in the cache of a model, in the dtype in use: a probe may have changed the one that was picked."""
    need = memory_need(
        loaded.name, dtype=loaded.dtype, device=loaded.device, quantize=loaded.quantize, runtime=loaded.kind
    )
    return need.cache // need.num_cached_tokens


def choose_controller(name: str | None, drafter: Drafter) -> Controller:
    """The controller of that name, or what suits the drafter when none is named.

    Raises:
        BadInputError: no such controller, or one whose every answer this drafter would leave unheard.
    """
    if name is None:
        return make_controller(drafter.default_controller)
    controller = make_controller(name)
    if drafter.default_controller == NO_DRAFTING and controller.name != NO_DRAFTING:
        raise BadInputError(
            f"expected no controller for the drafter {drafter.name}, which never drafts, got {name!r}; "
            "leave it out or take another drafter"
        )
    if drafter.certain and controller.needs_laws:
        raise BadInputError(
            f"expected a controller that reads no laws for the drafter {drafter.name}, which has none, got "
            f"{name!r}; use fixed:K or a drafter with a model"
        )
    return controller


def check_verifier(verifier: Verifier, drafter: Drafter) -> None:
    """Refuse, before any text is begun, a rule that could not judge what this drafter may propose.

    Raises:
        BadInputError: a rule for single paths beside a drafter of trees.
    """
    if drafter.may_branch and not verifier.judges_trees:
        raise BadInputError(
            f"expected a verifier that judges trees for the drafter {drafter.name}, got {verifier.name!r}, which judges "
            "single paths only; use verifier 'auto', 'recursive', 'traversal' or 'coupled', or a drafter of chains"
        )


def _require_texts(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise BadInputError(f"expected {name} to be a text, got {value!r}")


def default_drafter(model: str) -> str:
    """The drafter of a target for which none was named."""
    return "suffix+model:builtin-draft" if model == "builtin" else "suffix"


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt (or nothing that could hold several) and not a list of them."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], (Sequence, *_ARRAYS))


def checked_prompt(prompt: object) -> str | list[int]:
    """Text that can be encoded, or token ids as plain numbers.

    Raises:
        BadInputError: anything else, naming it.
    """
    if isinstance(prompt, str):
        return _checked_text(prompt)
    if isinstance(prompt, bytes | bytearray):
        raise BadInputError("expected text or token ids, got bytes; decode them first: prompt.decode()")
    if isinstance(prompt, _ARRAYS):
        if prompt.ndim != 1:
            raise BadInputError(
                f"expected token ids of one prompt [position], got an array of shape {list(prompt.shape)}; "
                "give a list of prompts, each without its padding"
            )
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise BadInputError(
            f"expected text or a list of token ids, got {type(prompt).__name__}; "
            'give "text", [5, 6, 7], or a list of such prompts'
        )
    return [_checked_token(token, place) for place, token in enumerate(prompt)]


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"expected text that UTF-8 can write, got the lone surrogate {text[error.start]!r} at character "
            f"{error.start}; remove it"
        ) from None
    return text


def _checked_token(token: object, place: int) -> int:
    # Python lets True pass for 1; nobody means that as a token.
    if not isinstance(token, bool):
        try:
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise BadInputError(f"expected token ids to be whole numbers, got {token!r} at place {place}")


def encode(target: LoadedModel, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, refused when it is no prompt or there is nothing to continue."""
    checked = checked_prompt(prompt)
    ids = target.encode(checked) if isinstance(checked, str) else checked
    if not checked or not ids:
        raise BadInputError("expected a prompt with at least one token, got an empty one")
    vocab_size = target.runtime.vocab_size
    if any(not 0 <= token < vocab_size for token in ids):
        raise BadInputError(f"expected token ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids


def check_request(
    target: LoadedModel, verifier: Verifier, ids: Sequence[int], params: SamplingParams
) -> None:
    """Refuse, before any work is spent, what could not be decoded.

    Raises:
        BadInputError: a prompt that leaves no place in the model's context, settings that name tokens outside
            its vocabulary, or settings that the verifier cannot serve.
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
    watcher: TextStream | None = None,
) -> Row:
    """A row for one prompt; without a seed its noise is keyed by fresh entropy.

    Raises:
        BadInputError: what `check_request` refuses.
    """
    check_request(target, verifier, ids, params)
    seeded = params.seed is not None
    return Row(
        tokens=list(ids),
        params=params,
        seed=params.seed if params.seed is not None else secrets.randbits(64),
        coupled=verifier.couples(seeded),
        end_tokens=target.end_tokens | frozenset(params.stop_token_ids),
        context_length=target.runtime.context_length,
        watcher=watcher,
    )
