"""The terminal chat with a server that is a few lines long."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.chat import ChatError, ChatServer, ChatSettings, Conversation


class Server(ThreadingHTTPServer):
    """Answers every chat with these events, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, events: list[dict[str, Any]], status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events = events
        self.status = status
        self.asked: list[dict[str, Any]] = []
        self.disconnected = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}, 200)

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.status != 200:
            self._send({"error": {"message": "no such model", "type": "x"}}, self.server.status)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": ping\n\n")
        for event in self.server.events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, body: Any, status: int) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


ANSWER = [delta(role="assistant", content=""), delta(content="Par"), delta(content="is"), delta(), {"choices": []}]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ANSWER) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def conversation(server: Server, **settings: Any) -> Conversation:
    return Conversation(ChatServer(server.url), ChatSettings(**settings), "first")


def test_an_answer_streams_and_is_remembered(server: Server) -> None:
    talk = conversation(server, system="Be brief.", temperature=0.0)
    assert list(talk.answer("Capital?")) == ["Par", "is"]
    list(talk.answer("And of Spain?"))
    first, second = server.asked
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]
    assert first["stream"] is True and first["temperature"] == 0.0 and "seed" not in first
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "And of Spain?"},
    ]


def test_an_answer_that_was_stopped_is_kept_as_far_as_it_came(server: Server) -> None:
    talk = conversation(server)
    answer = talk.answer("Capital?")
    assert next(answer) == "Par"
    answer.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "Par"}


def test_reset_keeps_the_system_message(server: Server) -> None:
    talk = conversation(server, system="Be brief.")
    list(talk.answer("Capital?"))
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_a_refusal_is_the_servers_own_words_and_changes_no_conversation(server: Server) -> None:
    server.status = 404
    talk = conversation(server)
    with pytest.raises(ChatError, match="no such model"):
        list(talk.answer("Capital?"))
    assert talk.messages == []


def test_an_error_in_the_stream_is_raised(server: Server) -> None:
    server.events = [delta(content="Par"), {"error": {"message": "engine fault"}}]
    pieces = []
    with pytest.raises(ChatError, match="engine fault"):
        for piece in conversation(server).answer("Capital?"):
            pieces.append(piece)
    assert pieces == ["Par"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1_or_not(server: Server, suffix: str) -> None:
    assert ChatServer(server.url + suffix).models() == ["first", "second"]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ChatError, match=r"127\.0\.0\.1:1"):
        ChatServer("http://127.0.0.1:1").models()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "//"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ChatError):
        ChatServer(url)
