"""One request and what came back, with what the checks ask about it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.lint.strict import EventStream, StrictError, decode_json, read_events
from headrace.lint.verdicts import NotOffered, Wrong
from headrace.lint.wire import Reply

SHOWN_REQUEST = 240
SHOWN_REPLY = 600

UNSUPPORTED_CODES = frozenset({"unsupported_parameter", "unsupported_value", "route_not_offered", "not_supported"})
UNSUPPORTED = re.compile(
    r"unsupported|unimplemented|disabled|not (yet |currently )?(be )?(supported|offered|implemented|enabled|available)"
    r"|(does not|doesn't|cannot) support|unrecognized",
    re.IGNORECASE,
)

JsonObject = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Exchange:
    """What was sent and what came back."""

    method: str
    path: str
    sent: bytes
    reply: Reply
    fields: Mapping[str, Any] | None = None
    """The body, when it was an ordinary JSON object."""
    cut: bool = False
    """The client left before the end."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return self.reply.status

    @property
    def streamed(self) -> bool:
        """Whether the reply is an event stream."""
        return self.reply.header("content-type").startswith("text/event-stream")

    @property
    def chat(self) -> bool:
        """Whether this asked for a chat completion."""
        return self.method == "POST" and self.path.endswith("/chat/completions")

    @property
    def completion(self) -> bool:
        """Whether this asked for a plain completion."""
        return self.method == "POST" and self.path.endswith("/completions") and not self.chat

    @functools.cached_property
    def events(self) -> EventStream:
        """The reply as an event stream."""
        return read_events(self.reply.body)

    @functools.cached_property
    def json(self) -> JsonObject:
        """The reply's body, a JSON object. Raises Wrong."""
        try:
            value = decode_json(self.reply.body)
        except StrictError as error:
            raise Wrong(f"the body is {error}", self) from None
        if not isinstance(value, dict):
            raise Wrong("the body is not a JSON object", self)
        return value

    @functools.cached_property
    def error(self) -> JsonObject:
        """The ``error`` object of the reply; empty when there is none of that shape."""
        try:
            value = decode_json(self.reply.body)
        except StrictError:
            return {}
        inner = value.get("error") if isinstance(value, dict) else None
        return inner if isinstance(inner, dict) else {}

    def shown(self) -> str:
        """The bytes that show it, bounded."""
        body = "" if not self.sent else f" {_cut(self.sent, SHOWN_REQUEST)}"
        extra = "".join(f" [{name}: {_cut(value.encode(), 60)}]" for name, value in self.headers.items())
        first = self.reply.head.split(b"\r\n", 1)[0]
        kind = self.reply.header("content-type")
        answer = _cut(self.reply.body, SHOWN_REPLY)
        return f"> {self.method} {self.path}{extra}{body}\n< {_cut(first, 80)} [{kind}] {answer}"


def _cut(data: bytes, limit: int) -> str:
    """Bytes as one line of text, middle left out when long."""
    if len(data) > limit:
        head, tail = data[: limit * 2 // 3], data[-limit // 3 :]
        return f"{_line(head)} …{len(data) - len(head) - len(tail)} bytes… {_line(tail)}"
    return _line(data)


def _line(data: bytes) -> str:
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unsupported(exchange: Exchange) -> bool:
    """Whether a refusal says that this is not to be had here, rather than that it was asked for wrongly."""
    if exchange.status not in (400, 404, 422, 501):
        return False
    if exchange.error.get("code") in UNSUPPORTED_CODES:
        return True
    if exchange.status == 501:
        return True
    return bool(UNSUPPORTED.search(str(exchange.error.get("message", ""))))


def accepted(exchange: Exchange, *fields: str) -> Exchange:
    """The exchange itself when it was a 200 and none of the fields was left unread. Raises NotOffered or Wrong."""
    if exchange.status != 200:
        if unsupported(exchange):
            raise NotOffered(f"refused: {str(exchange.error.get('message', ''))[:120]}")
        raise Wrong(f"answered {exchange.status} where 200 is right", exchange)
    ignored = {name.strip() for name in exchange.reply.header("x-ignored-fields").split(",")}
    if named := ignored & set(fields):
        raise NotOffered(f"ignored, and said so: {', '.join(sorted(named))}")
    return exchange


def offered_route(exchange: Exchange) -> Exchange:
    """The exchange itself unless there is no such route. Raises NotOffered."""
    missing = exchange.status in (403, 404, 405, 501) and exchange.error.get("code") not in (
        "model_not_found",
        "not_found",
    )
    if missing:
        raise NotOffered(f"no such route: {exchange.method} {exchange.path} answered {exchange.status}")
    return exchange


def refused(
    exchange: Exchange, status: int | tuple[int, ...] = 400, *, code: str = "", param: str = "", says: str = ""
) -> None:
    """Raise Wrong unless the reply is the error asked for. ``says`` is a pattern of the message."""
    statuses = status if isinstance(status, tuple) else (status,)
    if exchange.status not in statuses:
        raise Wrong(f"answered {exchange.status} where {' or '.join(map(str, statuses))} is right", exchange)
    error = exchange.error
    if not error:
        raise Wrong("an error without an error object", exchange)
    if code and error.get("code") != code:
        raise Wrong(f"code is {error.get('code')!r} where {code!r} is right", exchange)
    if param and not is_path(error.get("param"), param):
        raise Wrong(f"param is {error.get('param')!r} where {param!r} is right", exchange)
    message = str(error.get("message", ""))
    if says and not re.search(says, message):
        raise Wrong(f"the message does not say {says!r}", exchange)


def is_path(given: object, field_name: str) -> bool:
    """Whether an error's param names a field or something within it."""
    return isinstance(given, str) and re.match(re.escape(field_name) + r"($|[.\[])", given) is not None
