"""A small server that keeps the contract, or breaks it in the ways it is told to."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.headrace.lint import fake_model as model
from tests.headrace.lint.fake_answers import CREATED, Answers
from tests.headrace.lint.fake_fields import CHAT, COMPLETIONS, DETOKENIZE, RENDER, TOKENIZE, Refusal, read, token_id

NAME = "fake"
LATER = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/files",
    "/v1/batches",
)
OPEN = ("/livez", "/readyz", "/health")
BODY_LIMIT = 8 << 20


class FakeServer(ThreadingHTTPServer):
    """One server on a free port."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, quirks: frozenset[str] = frozenset(), key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.quirks = quirks
        self.key = key
        self.answers = Answers(quirks)
        self.seen: set[tuple[int, ...]] = set()
        self.requests = itertools.count(1)
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are no error."""


@contextlib.contextmanager
def fake_server(*quirks: str, key: str = "") -> Iterator[FakeServer]:
    """A running server."""
    with FakeServer(frozenset(quirks), key) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Routes."""

    server: FakeServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self._more: list[tuple[str, str]] = []
        self._given_id = ""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if sum(len(name) + len(value) for name, value in self.headers.items()) > 16 << 10:
            self.close_connection = True
            self._json(431, _error(431, Refusal(431, "too many headers", code=None)))
            return False
        return True

    def handle_expect_100(self) -> bool:
        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.wfile.flush()
        return True

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET

    def _answer(self) -> None:
        quirks = self.server.quirks
        try:
            body = self._body()
            self._route(urllib.parse.urlsplit(self.path).path, body)
        except Refusal as refusal:
            status = 200 if "200 for errors" in quirks else refusal.status
            if status == 404 and "no 404 for models" in quirks and refusal.code == "model_not_found":
                status = 400
            for name, value in refusal.headers.items():
                self._more.append((name, value))
            self._json(status, self._shaped(status, refusal))

    def _shaped(self, status: int, refusal: Refusal) -> dict[str, Any]:
        quirks = self.server.quirks
        if "detail errors" in quirks:
            return {"detail": refusal.message}
        body = _error(status, refusal)
        if "numbers for codes" in quirks:
            body["error"]["code"] = status
        if "repeats the input" in quirks:
            body["error"]["message"] += "x" * 20_000
        return body

    def _body(self) -> bytes:
        self._more = []
        self._given_id = self.headers.get("x-request-id", "")
        if "chunked" in self.headers.get("transfer-encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        length = int(self.headers.get("content-length") or 0)
        if length > BODY_LIMIT and "no body limit" not in self.server.quirks:
            self.close_connection = True
            raise Refusal(413, "the body is too large", code=None)
        return self.rfile.read(length)

    def _route(self, path: str, body: bytes) -> None:
        key, quirks = self.server.key, self.server.quirks
        given = self.headers.get("authorization", "").split(" ", 1)
        guarded = (
            path not in OPEN and self.command != "OPTIONS" and not (path == "/v1/models/" and "open slash" in quirks)
        )
        if key and guarded and "no auth" not in quirks and (given[0].lower() != "bearer" or given[-1] != key):
            raise Refusal(401, "no or wrong key", code="invalid_api_key")
        table = {
            "/v1/chat/completions": self._generate,
            "/v1/completions": self._generate,
            "/chat/completions": self._generate,
            "/completions": self._generate,
            "/v1/tokenize": self._tokenize,
            "/tokenize": self._tokenize,
            "/v1/detokenize": self._detokenize,
            "/detokenize": self._detokenize,
            "/v1/chat/completions/render": self._render,
        }
        if path in table:
            if self.command != "POST":
                raise _not_allowed("POST")
            if not self.headers.get("content-type", "").startswith("application/json") and "any type" not in quirks:
                raise Refusal(415, "send it with content-type: application/json", code=None)
            table[path](path, body)
        else:
            self._get(path)

    def _get(self, path: str) -> None:
        pages: dict[str, Any] = {
            "/livez": {},
            "/readyz": {},
            "/health": {},
            "/version": {"version": "0"},
            "/load": {"waiting": 0},
            "/v1/models": {"object": "list", "data": [self._card()]},
            f"/v1/models/{NAME}": self._card(),
            **({"/v1/models/": {}} if "open slash" in self.server.quirks else {}),
            "/openapi.json": _openapi(),
        }
        if path in pages or path in ("/metrics", "/docs"):
            if self.command not in ("GET", "HEAD"):
                raise _not_allowed("GET, HEAD")
            if path in pages:
                self._json(200, pages[path])
            else:
                kind = "text/plain; version=0.0.4" if path == "/metrics" else "text/html"
                self._send(200, b"a 1\n" if path == "/metrics" else b"<html></html>", kind)
        elif path.startswith("/v1/models/"):
            raise Refusal(404, "no such model", "model", "model_not_found")
        elif path.startswith(LATER):
            raise Refusal(404, "not here yet", code="route_not_offered")
        else:
            raise Refusal(404, "no such route", code="route_not_found")

    def _card(self) -> dict[str, Any]:
        return {
            "id": NAME,
            "object": "model",
            "created": CREATED,
            "owned_by": "fake",
            "max_model_len": model.CONTEXT,
            "status": "ready",
            "capabilities": {"tools": False, "reasoning": False, "json": False},
        }

    def _generate(self, path: str, data: bytes) -> None:
        quirks = self.server.quirks
        chat = path.endswith("chat/completions")
        fields, ignored = read(data, CHAT if chat else COMPLETIONS, quirks)
        if ignored and "drops fields silently" not in quirks:
            self._more.append(("x-ignored-fields", ", ".join(ignored[:16])))
        self._check_model(fields)
        self._given_id = self._given_id or fields.get("request_id", "")
        _check_combinations(chat, fields)
        prompts = [self._chat_prompt(fields)] if chat else _prompts(fields)
        if len(prompts) > 128 or len(prompts) * (fields.get("n") or 1) > 256:
            raise Refusal(400, "too many prompts", "prompt")
        if "dies of a bias" in quirks and fields.get("min_tokens", 0) > 10**8:
            self.server.broken = True
        limit = self._limit(chat, fields, max(map(len, prompts)))
        cached = self._cached(prompts)
        if self.server.broken:
            raise Refusal(500, "the engine is dead", code=None)
        if fields.get("timeout", 1) < 0.01 and "no deadlines" not in quirks:
            self._more.append(("x-should-retry", "false"))
            raise Refusal(504, "too late", "timeout", "timeout")
        body = self.server.answers.whole(chat, prompts, fields, limit, cached)
        if fields.get("stream"):
            self._stream(self.server.answers.events(chat, body, fields))
        else:
            if "another answer whole" in quirks and limit > 3:
                choice = body["choices"][0]
                holder, name = (choice["message"], "content") if chat else (choice, "text")
                holder[name] = holder[name].rstrip(",") + "!"
            self._json(200, body)

    def _check_model(self, fields: dict[str, Any]) -> None:
        if "model" not in fields:
            raise Refusal(400, "model is missing", "model", "missing_required_parameter")
        if fields["model"] != NAME and "any model name" not in self.server.quirks:
            raise Refusal(404, "no such model", "model", "model_not_found")

    def _chat_prompt(self, fields: dict[str, Any]) -> list[int]:
        messages = _messages(fields)
        if fields.get("add_generation_prompt") and fields.get("continue_final_message"):
            raise Refusal(400, "two endings", "continue_final_message")
        return model.chat_ids(
            messages,
            prompt=fields.get("add_generation_prompt", True),
            resume=bool(fields.get("continue_final_message")),
            literal="user text is control" in self.server.quirks,
        )

    def _limit(self, chat: bool, fields: dict[str, Any], prompt: int) -> int:
        given = fields.get("max_completion_tokens") if chat else None
        given = fields.get("max_tokens") if given is None or "max_tokens wins" in self.server.quirks else given
        if given == 0 and not fields.get("echo"):
            raise Refusal(400, "max_tokens is 0", "max_tokens")
        room = model.CONTEXT - prompt
        limit = (room if chat else 16) if given in (None, -1) else given
        if room < 1:
            numbers = (
                f"However, you requested {prompt + limit} tokens ({prompt} in the messages, {limit} in the completion)."
            )
            message = f"This model's maximum context length is {model.CONTEXT} tokens. {numbers}"
            raise Refusal(400, message, "messages" if chat else "prompt", "context_length_exceeded")
        if (fields.get("min_tokens") or 0) > limit:
            raise Refusal(400, "min_tokens is more than max_tokens", "min_tokens")
        if limit > room:
            self._more.append(("x-clamped", f"max_tokens={room}"))
        return min(limit, room)

    def _cached(self, prompts: list[list[int]]) -> int:
        cached = 0
        for prompt in prompts:
            if tuple(prompt) in self.server.seen:
                cached += (len(prompt) - 1) // 16 * 16
            self.server.seen.add(tuple(prompt))
        return cached

    def _tokenize(self, path: str, data: bytes) -> None:
        fields, _ = read(data, TOKENIZE, self.server.quirks)
        self._check_model({"model": NAME, **fields})
        if "messages" in fields:
            ids = self._chat_prompt(fields)
        elif "prompt" in fields:
            ids = model.encode(fields["prompt"])
        else:
            raise Refusal(400, "neither prompt nor messages", "prompt", "missing_required_parameter")
        count = len(ids) + ("another count" in self.server.quirks)
        self._json(
            200,
            {"count": count, "max_model_len": model.CONTEXT, "tokens": ids, "token_strs": [model.name(i) for i in ids]},
        )

    def _detokenize(self, path: str, data: bytes) -> None:
        fields, _ = read(data, DETOKENIZE, self.server.quirks)
        if "tokens" not in fields:
            raise Refusal(400, "tokens are missing", "tokens", "missing_required_parameter")
        text = model.decode(fields["tokens"])
        self._json(200, {"prompt": text.replace("  ", " ") if "strips text" in self.server.quirks else text})

    def _render(self, path: str, data: bytes) -> None:
        fields, _ = read(data, RENDER, self.server.quirks)
        self._check_model(fields)
        ids = self._chat_prompt(fields)
        self._json(
            200,
            {
                "prompt": model.decode(ids),
                "token_ids": ids,
                "token_texts": list(map(model.name, ids)),
                "template": "default",
                "count": len(ids),
            },
        )

    def _stream(self, events: Iterator[bytes]) -> None:
        quirks = self.server.quirks
        kind = "text/plain" if "plain streams" in quirks else "text/event-stream; charset=utf-8"
        old = self.request_version == "HTTP/1.0" and "chunks for HTTP/1.0" not in quirks
        headers = [("Content-Type", kind), *([] if old else [("Transfer-Encoding", "chunked")])]
        if "cached streams" not in quirks:
            headers += [("Cache-Control", "no-cache, no-transform"), ("X-Accel-Buffering", "no")]
        self._begin(200, headers)
        for event in events:
            self.wfile.write(event if old else b"%x\r\n%s\r\n" % (len(event), event))
        if "no last chunk" in quirks or old:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _json(self, status: int, body: Any) -> None:
        kind = "text/html" if status >= 400 and "HTML errors" in self.server.quirks else "application/json"
        data = json.dumps(body).encode()
        if "same key twice" in self.server.quirks:
            data = data.replace(b'"object"', b'"object": "x", "object"', 1)
        self._send(status, data, kind)

    def _send(self, status: int, data: bytes, kind: str) -> None:
        extra = 2 if "short bodies" in self.server.quirks else 0
        self._begin(status, [("Content-Type", kind), ("Content-Length", str(len(data) + extra))])
        self.close_connection |= bool(extra)
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def _begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.send_response(status)
        if "no request id" not in self.server.quirks:
            given = self._given_id
            good = given.isascii() and given.isprintable() and " " not in given and 0 < len(given) <= 256
            own = f"req-{next(self.server.requests)}"
            self.send_header("x-request-id", given if good and "own request ids" not in self.server.quirks else own)
        for name, value in [*headers, *self._more]:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def _error(status: int, refusal: Refusal) -> dict[str, Any]:
    kind = "timeout_error" if status == 504 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def _not_allowed(methods: str) -> Refusal:
    refusal = Refusal(405, f"it takes {methods}", code=None)
    refusal.headers["Allow"] = methods
    return refusal


def _check_combinations(chat: bool, fields: dict[str, Any]) -> None:
    if fields.get("stream_options") and not fields.get("stream"):
        raise Refusal(400, "stream_options without stream", "stream_options")
    for name, value in (fields.get("stream_options") or {}).items():
        if not isinstance(value, bool):
            raise Refusal(400, f"'{name}' is no flag", f"stream_options.{name}")
    if chat and fields.get("top_logprobs") is not None and not fields.get("logprobs"):
        raise Refusal(400, "top_logprobs without logprobs", "top_logprobs")


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if messages is None:
        raise Refusal(400, "messages are missing", "messages", "missing_required_parameter")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages are empty", "messages")
    for at, message in enumerate(messages):
        good = isinstance(message, dict) and message.get("role") in ("system", "developer", "user", "assistant", "tool")
        content = message.get("content") if good else 5
        if isinstance(content, list):
            kinds = [part.get("type") for part in content if isinstance(part, dict)]
            good = (
                len(kinds) == len(content)
                and all(isinstance(part.get("text"), str) for part in content if part["type"] == "text")
                if all(kinds)
                else False
            )
            if good and any(kind != "text" for kind in kinds):
                raise Refusal(
                    400,
                    f"parts of type {next(k for k in kinds if k != 'text')} are not supported",
                    f"messages[{at}].content",
                )
        elif content is not None and not isinstance(content, str):
            good = False
        if not good:
            raise Refusal(400, f"message {at} is no message", f"messages[{at}]")
    return messages


def _prompts(fields: dict[str, Any]) -> list[list[int]]:
    if "prompt" not in fields:
        raise Refusal(400, "prompt is missing", "prompt", "missing_required_parameter")
    prompt = fields["prompt"]
    if isinstance(prompt, str) and prompt:
        return [model.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(map(token_id, prompt)):
            return [prompt]
        if all(isinstance(one, str) and one for one in prompt):
            return [model.encode(one) for one in prompt]
        if all(isinstance(one, list) and one and all(map(token_id, one)) for one in prompt):
            return list(prompt)
    raise Refusal(400, "that is no prompt", "prompt")


def _openapi() -> dict[str, Any]:
    operation = {"requestBody": {}, "responses": {"200": {}, "400": {}}}
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/tokenize", "/v1/detokenize", "/health")
    return {"openapi": "3.1.0", "paths": {path: {"post": operation} for path in paths}}
