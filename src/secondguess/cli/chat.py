"""`secondguess chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from secondguess.cli import options
from secondguess.cli.generate import write_rounds
from secondguess.cli.option_groups import option
from secondguess.cli.options import output_option
from secondguess.cli.output import JsonWriter, TerminalWriter, Writer, print_note
from secondguess.cli.progress import load_with_progress
from secondguess.cli.prompts import Request, decode, read_template
from secondguess.cli.sampling import SAMPLING, sampling_option
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.params import SamplingParams

if TYPE_CHECKING:
    from secondguess.api import LLM
    from secondguess.stats import Stats

HELP = """\
/stats   statistics of the last reply and of the conversation
/reset   begin a new conversation
/help    this list
/quit    leave, as Ctrl-D does
Ctrl-C ends a reply and keeps what it has. A line that ends with \\ goes on in the next one."""

SAMPLING_OF_REPLIES = SAMPLING.only(
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
    "draft_length",
).replace(option("max_tokens", Annotated[int, sampling_option("Maximum number of tokens of a reply.")], 512))


def chat(
    system: Annotated[
        str | None,
        output_option("Instructions at the beginning of every conversation.", show_default="none"),
    ] = None,
    chat_template: Annotated[Path | None, options.template_option] = None,
    json: options.Json = False,
    *,
    loading: Annotated[options.Loading, options.LOADING.without("share_history")],
    params: Annotated[SamplingParams, SAMPLING_OF_REPLIES],
) -> int:
    """Chat with a model.

    Replies are coloured by origin (drafter or target), each followed by one line of
    statistics. /help lists the commands. Messages can also come from a pipe, one per
    line; --json prints one object per reply.
    """
    template = read_template(chat_template)
    loading.require_use_of([params])
    llm = load_with_progress(loading.settings)
    _set_template(llm, template)
    conversation = Conversation(llm, params, JsonWriter(llm) if json else TerminalWriter(llm), system)
    interactive = sys.stdin.isatty()
    if interactive:
        print_note("/help lists the commands, Ctrl-D leaves")
    for line in _read_lines(interactive):
        command = line.strip()
        if command == "/quit":
            break
        if re.fullmatch(r"/\w+", command):
            _run_command(conversation, command)
        elif line.strip():
            _answer(conversation, line, interactive)
    return 0


class Conversation:
    """Messages, and the statistics of the replies."""

    def __init__(self, llm: LLM, params: SamplingParams, writer: Writer, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._writer = writer
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the instructions, and the statistics."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.stats: list[Stats] = []

    def answer(self, text: str, shown: str = "") -> None:
        """Write `shown` and the reply to a message, and add both messages to the conversation.

        After Ctrl-C the reply so far has been written and added; after an error the message is not added.
        """
        from secondguess.api import Generation

        messages = [*self.messages, {"role": "user", "content": text}]
        generation = Generation(self._llm, [messages], [self._params])
        self._writer.begin([Request(shown)])
        try:
            write_rounds(generation, self._writer)
        finally:
            (output,) = generation.outputs()
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
            self.stats.append(output.stats)


def _answer(conversation: Conversation, text: str, interactive: bool) -> None:
    """Answer a message; on a terminal, neither Ctrl-C nor an error ends the conversation."""
    if not interactive:
        conversation.answer(text, f"> {text}\n")
        return
    try:
        conversation.answer(text)
    except KeyboardInterrupt:
        pass
    except SecondGuessError as error:
        print_note(f"{error}; /reset begins a new conversation")


def _run_command(conversation: Conversation, command: str) -> None:
    if command == "/reset":
        conversation.reset()
        print_note("new conversation")
    elif command == "/stats":
        print_note(_describe(conversation.stats))
    else:
        if command != "/help":
            print_note(f"expected one of these commands, got {command}")
        print_note(HELP)


def _describe(stats: list[Stats]) -> str:
    """Return the statistics of the last reply and of all replies."""
    from secondguess.bench.summary import sum_stats

    if not stats:
        return "no replies yet"
    total = sum_stats(stats)
    return f"last reply ({stats[-1].num_tokens} tokens): {stats[-1]}\nall replies ({total.num_tokens} tokens): {total}"


def _read_lines(interactive: bool) -> Iterator[str]:
    """Yield messages and commands until the end of the input; a trailing backslash joins lines."""
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` then edits lines and recalls earlier ones)
    lines: Iterator[str | None] = _typed_lines() if interactive else _piped_lines()
    for line in lines:
        parts: list[str] = []
        while line is not None and line.endswith("\\"):
            parts.append(line[:-1])
            line = next(lines, "")
        if line is not None:
            yield "\n".join([*parts, line])


def _typed_lines() -> Iterator[str | None]:
    """Yield typed lines; None after Ctrl-C, which drops the lines of the message so far."""
    is_shown = sys.stdout.isatty()  # else standard output has the replies alone
    while True:
        try:
            if not is_shown:
                print("> ", end="", file=sys.stderr, flush=True)
            yield input("> " if is_shown else "")
        except EOFError:
            print_note("")
            return
        except KeyboardInterrupt:
            print_note("\nCtrl-D or /quit leaves")
            yield None


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield decode(line, "standard input").rstrip("\r\n")


def _set_template(llm: LLM, template: str | None) -> None:
    """Give the tokenizer another template; a model without one is refused."""
    from secondguess.prompts import processor_template

    tokenizer = llm.target.tokenizer
    if template is not None:
        tokenizer.chat_template = template
    if not (tokenizer.chat_template or processor_template(llm.target)):
        raise BadInputError(
            f"expected a model with a chat template, got {llm.target.name}, whose tokenizer has none; "
            "give one with --chat-template FILE, or use `secondguess generate`"
        )
