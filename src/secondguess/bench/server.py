"""Any server with OpenAI's protocol as a benchmark system, measured from outside.

Only `POST /v1/completions` is used, with the prompt as text: the server has its own tokenizer, so
token ids can neither be sent nor compared. The clock runs from sending the request to the last
byte of the response; the connection is opened before.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from secondguess.bench.systems import Run, System
from secondguess.errors import BadInputError
from secondguess.validation import describe

TIMEOUT_SECONDS = 600.0
"""Seconds without data after which a request fails."""
KEY_VARIABLE = "OPENAI_API_KEY"
SHOWN = 200
"""Maximum number of characters of a server's response that an error message quotes."""

_SCHEMES = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def is_address(text: str) -> bool:
    """Return whether a value of `--against` is a server address rather than a library."""
    return text.lower().startswith(("http://", "https://"))


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server and the model to request.

    Args:
        scheme: `http` or `https`.
        host: host name, with the port if one was given.
        path: path in front of `/v1`, usually empty.
        model: name of the model; None takes the server's only one.
    """

    scheme: str
    host: str
    path: str = ""
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Parse `http://HOST[:PORT][/PATH][/v1][,model=NAME]`.

        Raises:
            BadInputError: an invalid address, credentials in it, or an option other than `model`.
        """
        url, comma, option = text.partition(",")
        form = "http://HOST:PORT or http://HOST:PORT,model=NAME"
        key, _, model = option.partition("=")
        if comma and (key.strip() != "model" or not model.strip() or "," in model):
            raise BadInputError(
                f"expected a server as {form}, got the option {option!r}; give model=NAME once"
            )
        try:
            parts = urlsplit(url)
            well_formed = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            well_formed = False
        if not well_formed or parts.scheme not in _SCHEMES or parts.query or parts.fragment:
            raise BadInputError(f"expected a server as {form}, got {text!r}; mend the address")
        if "@" in parts.netloc:
            raise BadInputError(
                f"expected a server without a name and a password in its address, got one for {parts.hostname}; "
                f"give its key in {KEY_VARIABLE}"
            )
        path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        return cls(parts.scheme, parts.netloc, path, model.strip() or None)

    @property
    def name(self) -> str:
        """Host, followed by the model if one was named."""
        return f"{self.host} {self.model}" if self.model else self.host

    @property
    def shown(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}"


class _Usage(BaseModel):
    completion_tokens: Annotated[int, Field(ge=1, strict=True)]


class _Completion(BaseModel):
    usage: _Usage


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


AnswerT = TypeVar("AnswerT", bound=BaseModel)


class Server(System):
    """Server that continues prompts with `/v1/completions`.

    It is asked for the same number of tokens as the other systems, with `ignore_eos` if the server
    accepts that; the number it reports (`usage.completion_tokens`) counts. It returns no ids.

    Args:
        address: address of the server.
        tokenizer: converts a prompt's token ids to text.

    Raises:
        BadInputError: no server at the address, an error status, or a response in another format.
    """

    speculates = False
    exact_length = False

    def __init__(self, address: ServerAddress, tokenizer: Any) -> None:
        self.family, self.name = address.host, address.name
        self._address, self._tokenizer = address, tokenizer
        self._supports_ignore_eos = True
        self._model = address.model or self._only_model()

    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        request = {
            "model": self._model,
            # Without special tokens: the server's own tokenizer adds them.
            "prompt": self._tokenizer.decode(
                prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            "max_tokens": num_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        status = 400
        if self._supports_ignore_eos:
            status, answer, seconds = self._ask("POST", "completions", {**request, "ignore_eos": True})
        if status in (400, 422):
            # OpenAI's own protocol has no such field, and some servers refuse unknown fields. A request
            # that is refused without it too was refused for another reason.
            status, answer, seconds = self._ask("POST", "completions", request)
            self._supports_ignore_eos &= status in (400, 422)
        usage = self._parse(_Completion, status, answer, "completions").usage
        return Run([], seconds, lengths=(usage.completion_tokens,))

    def _only_model(self) -> str:
        """Return the name of the server's model.

        Raises:
            BadInputError: the server does not have exactly one model.
        """
        status, answer, _ = self._ask("GET", "models")
        names = [model.id for model in self._parse(_Models, status, answer, "models").data]
        if len(names) != 1:
            raise BadInputError(
                f"expected one model at {self._address.shown}, got {', '.join(names[:5]) or 'none'}; "
                f"name one: --against {self._address.shown},model=NAME"
            )
        return names[0]

    def _parse(self, answer_type: type[AnswerT], status: int, answer: bytes, what: str) -> AnswerT:
        url = f"{self._address.shown}/v1/{what}"
        shown = repr(" ".join(answer.decode("utf-8", "replace").split())[:SHOWN]) if answer else "nothing"
        if status != http.client.OK:
            hint = f"give its key in {KEY_VARIABLE}" if status in (401, 403) else "is the address right?"
            raise BadInputError(f"expected an answer from {url}, got status {status}: {shown}; {hint}")
        try:
            return answer_type.model_validate_json(answer)
        except ValidationError as error:
            raise BadInputError(
                f"{describe(error)}, in the answer of {url}: {shown}; is it an OpenAI-compatible server?"
            ) from None

    def _ask(self, method: str, what: str, body: object = None) -> tuple[int, bytes, float]:
        """Send a request; return status, body and seconds from sending to the last byte."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        connection = _SCHEMES[self._address.scheme](self._address.host, timeout=TIMEOUT_SECONDS)
        try:
            connection.connect()
            start = time.perf_counter()
            connection.request(method, f"{self._address.path}/v1/{what}", content, headers)
            response = connection.getresponse()
            answer = response.read()
            return response.status, answer, time.perf_counter() - start
        except (OSError, http.client.HTTPException) as error:
            raise BadInputError(
                f"expected an OpenAI-compatible server at {self._address.shown}, got "
                f"{type(error).__name__}: {error}; start it or leave it out"
            ) from None
        finally:
            connection.close()
