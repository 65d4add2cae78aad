"""What drafters learn from: prompts that the target answers, or texts as they stand.

A drafter has to guess what the target writes, so the answers in a data set are worth less than the target's own: they are
written anew by default, with the loop that decodes everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from secondguess.api import LLM, Generation
from secondguess.bench.prompt_files import (
    CHAT_KEYS,
    Prompt,
    Record,
    any_record,
    holds_records,
    read_paragraphs,
    read_records,
    read_text,
)
from secondguess.bench.workloads import spread
from secondguess.errors import BadInputError
from secondguess.jobs.acceptance_prompts import STANDARD_LIBRARY, standard_library_prompts
from secondguess.names import require_between
from secondguess.runtime.loading import LoadedModel
from secondguess.sampling import SamplingParams
from secondguess.train.lessons import TaughtText, read_texts, windows, write_texts

ANSWER_KEYS = ("completion", "response", "answer", "output")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Roles under their names in ShareGPT's files."""
BATCHES_PER_FILE = 4
DEFAULT_TEMPERATURES = (0.0, 0.7, 1.0)

Message = Mapping[str, str]
Tell = Callable[[int, int], None]
"""Told how many of how many texts are written."""


@dataclass(frozen=True)
class Document(Prompt):
    """A prompt, or a text to be learnt as it stands.

    Args:
        answer: what stands behind the prompt in the data; counts when it is learnt as it stands.
        messages: of a chat, with `role` and `content`; instead of text and answer.
    """

    answer: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class AnswerSettings:
    """How texts are made.

    Args:
        temperatures: of the target's answers, in turn.
        max_tokens: of an answer.
        length: of a text, prompt and answer, in tokens; longer prompts lose their beginning.
        batch_size: answers written at a time.
        seed: of the answers.
    """

    temperatures: tuple[float, ...] = DEFAULT_TEMPERATURES
    max_tokens: int = 128
    length: int = 512
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise BadInputError("expected at least one temperature, got none")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        require_between("the length of the texts", self.length, 8, 1_000_000)
        require_between("the tokens of an answer", self.max_tokens, 1, 1_000_000)
        require_between("the answers at a time", self.batch_size, 1, 4096)

    def require_room_for_prompts(self) -> None:
        """Refuse settings with which an answer leaves nothing of its text to the prompt.

        Texts that are learnt as they stand are not asked: they have no answers.

        Raises:
            BadInputError: naming both.
        """
        if self.max_tokens >= self.length:
            raise BadInputError(
                f"expected --max-tokens below --length, which holds the prompt too, got {self.max_tokens} and {self.length}"
            )


def read_documents(paths: Sequence[Path], as_is: bool) -> list[Document]:
    """What the files hold: JSON lines with a `prompt`, a `text` or `messages`, or plain text.

    Plain text is one document as it stands, or else a prompt per paragraph.

    Raises:
        BadInputError: a file that is missing, empty, binary or malformed, with the place.
    """
    return [document for path in paths for document in _read_file(path, as_is)]


def default_documents(num_prompts: int) -> list[Document]:
    """Prompts out of the installed standard library."""
    workload = standard_library_prompts(num_prompts)
    return [Document(text, STANDARD_LIBRARY) for text in workload.prompts]


def _read_file(path: Path, as_is: bool) -> list[Document]:
    if not path.is_file():
        raise BadInputError(
            f"expected a file of training texts, found none at {path}; give JSON lines with a 'prompt', a 'text' or "
            "'messages' each, or plain text, with --data FILE"
        )
    if holds_records(path):
        return read_records(path, _document)
    if not as_is:
        return [Document(prompt.text, prompt.task) for prompt in read_paragraphs(path)]
    text = read_text(path)
    if not text.strip():
        raise BadInputError(f"expected text in {path.name}, got an empty file")
    return [Document(text, path.stem)]


def _document(record: Record, path: Path) -> Document:
    messages = next((record[key] for key in CHAT_KEYS if isinstance(record.get(key), list)), None)
    if messages is not None:
        chat = tuple(_message(each) for each in messages)  # type: ignore[attr-defined]
        if not any(each["content"].strip() for each in chat if each["role"] != "assistant"):
            raise BadInputError("expected messages of which at least one is the user's, got none")
        return Document("\n\n".join(each["content"] for each in chat), path.stem, messages=chat)
    text = record.get("text")
    if isinstance(text, str) and text.strip():
        return Document(text, path.stem)
    try:
        prompt = any_record(record, path)
    except BadInputError:
        keys = f"the keys {', '.join(sorted(record))}" if record else "an empty object"
        raise BadInputError(
            f"expected an object with a non-empty 'prompt', 'text' or 'messages', got {keys}"
        ) from None
    answer = next((record[key] for key in ANSWER_KEYS if isinstance(record.get(key), str)), "")
    return Document(prompt.text, prompt.task, answer=str(answer))


def _message(message: object) -> Message:
    if isinstance(message, dict):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": ROLES.get(role, role), "content": content}
    raise BadInputError(f"expected messages with a text 'role' and 'content', got {message!r:.60}")


def texts_as_they_stand(target: LoadedModel, documents: Sequence[Document], length: int) -> list[TaughtText]:
    """The documents' own texts, in windows of `length` tokens.

    In chats what the assistant says counts; behind a prompt its answer; everything else counts whole.

    Raises:
        BadInputError: too little text to learn from, or windows longer than the target's context.
    """
    _require_room(target, length)
    found = [window for each in documents for window in windows(*_taught(target, each), length)]
    if len(found) < 2:
        raise BadInputError(
            f"expected text for at least 2 windows of at most {length} tokens, got {len(found)}; "
            "give more data or a smaller --length"
        )
    return found


def _require_room(target: LoadedModel, length: int) -> None:
    context = target.runtime.context_length
    if length >= context:
        raise BadInputError(f"expected --length below the target's context of {context} tokens, got {length}")


def _taught(target: LoadedModel, document: Document) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them count."""
    if document.messages and target.tokenizer.chat_template:
        return _taught_chat(target, document.messages)
    ids = target.encode(document.text + document.answer)
    # A tokenizer may join the end of a prompt with its answer: what is shared with the prompt alone does not count.
    prompt = target.encode(document.text) if document.answer else []
    shared = _shared_prefix(prompt, ids)
    return ids, [place >= shared for place in range(len(ids))]


def _taught_chat(target: LoadedModel, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    ids = _chat_ids(target, messages, opens_answer=False)
    counts = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _shared_prefix(_chat_ids(target, messages[:index], opens_answer=True), ids)
            end = _shared_prefix(_chat_ids(target, messages[: index + 1], opens_answer=False), ids)
            counts[start:end] = [True] * max(0, end - start)
    return ids, counts


def _shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(first), len(second)))


def _chat_ids(target: LoadedModel, messages: Sequence[Message], opens_answer: bool) -> list[int]:
    try:
        ids: list[int] = target.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=opens_answer, return_dict=False
        )
    except Exception as error:  # templates raise errors of their own, of any class
        raise BadInputError(
            f"expected messages that the chat template of {target.name} can write, got: {error}"
        ) from error
    return ids


def prompt_ids(target: LoadedModel, document: Document) -> list[int]:
    """What the target is asked to continue: a chat up to the last thing that is not the assistant's."""
    if not document.messages:
        return target.encode(document.text)
    asked = list(document.messages)
    while asked[-1]["role"] == "assistant":
        asked.pop()
    if target.tokenizer.chat_template:
        return _chat_ids(target, asked, opens_answer=True)
    return target.encode("\n\n".join(message["content"] for message in asked))


def write_answers(
    llm: LLM,
    documents: Sequence[Document],
    settings: AnswerSettings,
    folder: Path,
    tell: Tell,
    pause: Callable[[], None],
) -> list[TaughtText]:
    """Let the target answer all prompts; what a call that was cut off has stored is not written again.

    Args:
        folder: one file of texts for some batches each.
        tell: called after each batch.
        pause: called between batches; may raise.

    Raises:
        BadInputError: texts longer than the target's context.
    """
    _require_room(llm.target, settings.length)
    per_file = settings.batch_size * BATCHES_PER_FILE
    texts: list[TaughtText] = []
    for start in range(0, len(documents), per_file):
        path = folder / f"{start:07}.npz"
        if path.is_file():
            texts += read_texts(path)
            tell(len(texts), len(documents))
            continue
        fresh: list[TaughtText] = []
        for at in range(start, min(start + per_file, len(documents)), settings.batch_size):
            part = documents[at : min(at + settings.batch_size, start + per_file)]
            fresh += _answered(llm, part, at, settings)
            tell(len(texts) + len(fresh), len(documents))
            pause()
        write_texts(path, fresh)
        texts += fresh
    return texts


def _answered(
    llm: LLM, documents: Sequence[Document], first: int, settings: AnswerSettings
) -> list[TaughtText]:
    most = settings.length - settings.max_tokens
    prompts = [prompt_ids(llm.target, document)[-most:] for document in documents]
    params = [
        SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperatures[(first + row) % len(settings.temperatures)],
            seed=settings.seed + first + row,
        )
        for row in range(len(prompts))
    ]
    outputs = Generation(llm, prompts, params).run()
    return [
        TaughtText([*prompt, *output.token_ids], [False] * len(prompt) + [True] * len(output.token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def some_of(documents: Sequence[Document], most: int) -> list[Document]:
    """At most so many, evenly spread."""
    return list(spread(tuple(documents), most))
