"""A streaming chat in the terminal with any server that speaks the OpenAI contract. Knows HTTP, not headrace."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import urllib.parse
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class ChatError(RuntimeError):
    """The server is not there or refused; one line for people."""


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the person asked for; None leaves a choice to the server."""

    url: str = "http://127.0.0.1:8000"
    model: str = ""
    """Empty: the first the server lists."""
    system: str = ""
    api_key: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def sampling(self) -> dict[str, Any]:
        """Request fields that were set."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return {key: value for key, value in values.items() if value is not None}


class ChatServer:
    """One server's address; a connection is made for each call."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url!r} is not http://HOST:PORT")
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the models it lists."""
        response = self._call("GET", "/v1/models", None, CONNECT_SECONDS)
        return [entry["id"] for entry in json.loads(response.read())["data"]]

    def stream(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """Text of a streamed chat completion, piece by piece. Closing the iterator ends the request."""
        response = self._call("POST", "/v1/chat/completions", {**body, "stream": True}, ANSWER_SECONDS)
        with response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield from _text(json.loads(data))

    def _call(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=seconds)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"no server at {self.url}: {error}") from None
        if response.status != 200:
            raise ChatError(_error_message(response.read(), response.status))
        return response


def run(settings: ChatSettings) -> int:
    """Talk until the person leaves; raises ChatError when the server cannot be talked to.

    Without a terminal the whole of stdin is one message, and its answer goes to stdout.
    """
    server = ChatServer(settings.url, settings.api_key)
    models = server.models()
    if not settings.model and not models:
        raise ChatError(f"{settings.url} serves no model yet")
    conversation = Conversation(server, settings, settings.model or models[0])
    if not sys.stdin.isatty():
        for text in conversation.answer(sys.stdin.read()):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return 0
    return _talk(conversation)


class Conversation:
    """Messages so far; an answer that was stopped half way is kept as far as it came."""

    def __init__(self, server: ChatServer, settings: ChatSettings, model: str) -> None:
        self.model = model
        self._server = server
        self._settings = settings
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Only the system message stays."""
        system = self._settings.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer to ``text``."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            body = {"model": self.model, "messages": asked, **self._settings.sampling()}
            with contextlib.closing(self._server.stream(body)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _talk(conversation: Conversation) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{conversation.model}[/bold]  [dim]{HELP}[/dim]")
    while True:
        try:
            text = console.input("\n[bold cyan]›[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            console.print(HELP, style="dim")
        elif text:
            _print_answer(console, conversation, text)


def _print_answer(console: Console, conversation: Conversation, text: str) -> None:
    answer = conversation.answer(text)
    try:
        for piece in answer:
            console.print(piece, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    except (ChatError, OSError) as error:
        console.print(str(error), style="red", markup=False)
    finally:
        answer.close()
    console.print()


def _text(event: dict[str, Any]) -> Iterator[str]:
    """The text in one event; raises ChatError for an error event."""
    if error := event.get("error"):
        raise ChatError(str(error.get("message", error)))
    for choice in event.get("choices", []):
        if text := choice["delta"].get("content"):
            yield text


def _error_message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
