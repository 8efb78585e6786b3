"""Connections: what HTTP/1.1 clients of all kinds do."""

from __future__ import annotations

import json

from headrace.lint.exchange import Exchange
from headrace.lint.session import CHAT, Session, encode
from headrace.lint.verdicts import Wrong, check
from headrace.lint.wire import request_bytes


@check("8", "A connection serves one request after another.")
def keep_alive(session: Session) -> None:
    with session.connect() as connection:
        for _ in range(2):
            exchange = session.raw(connection, "POST", CHAT, session.chat_fields(max_tokens=2))
            if exchange.status != 200:
                raise Wrong(f"answered {exchange.status} on a kept connection", exchange)


@check("8", "A connection serves another request after a stream has ended.")
def keep_alive_after_a_stream(session: Session) -> None:
    with session.connect() as connection:
        for stream in (True, False):
            exchange = session.raw(connection, "POST", CHAT, session.chat_fields(max_tokens=2, stream=stream))
            if exchange.status != 200:
                raise Wrong(f"answered {exchange.status} on a kept connection", exchange)


@check("8", "A connection serves another request after an error.")
def keep_alive_after_an_error(session: Session) -> None:
    with session.connect() as connection:
        session.raw(connection, "POST", CHAT, {"model": session.target.model})
        exchange = session.raw(connection, "POST", CHAT, session.chat_fields(max_tokens=2))
        if exchange.status != 200:
            raise Wrong(f"answered {exchange.status} after an error on the same connection", exchange)


@check("5", "A body sent in chunks is read like any other.")
def chunked_request(session: Session) -> None:
    body = encode(session.chat_fields(max_tokens=2))
    pieces = [body[at : at + 40] for at in range(0, len(body), 40)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    exchange = session.post(CHAT, framed, headers={"Transfer-Encoding": "chunked"})
    if exchange.status != 200:
        raise Wrong(f"answered {exchange.status} to a chunked body", exchange)


@check("5", "A client that waits for 100 Continue, as curl does with long bodies, gets it or its answer.")
def expect_continue(session: Session) -> None:
    body = encode(session.chat_fields(max_tokens=2))
    headers = {"Expect": "100-continue", "Content-Type": "application/json"}
    if session.target.api_key:
        headers["Authorization"] = f"Bearer {session.target.api_key}"
    data = request_bytes(session.target.address, "POST", CHAT, headers, body)
    with session.connect() as connection:
        connection.send(data[: len(data) - len(body)])
        # Clients send the body after a second without an answer; nothing is gained by waiting that long here.
        connection.send(body)
        reply = connection.reply("POST")
    if reply.status != 200:
        exchange = Exchange("POST", CHAT, body, reply, headers={"Expect": "100-continue"})
        raise Wrong(f"answered {reply.status}", exchange)


@check("5", "A body with a charset in its content type is read.")
def charset_in_content_type(session: Session) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    exchange = session.post(CHAT, encode(session.chat_fields(max_tokens=2)), headers=headers)
    if exchange.status != 200:
        raise Wrong(f"answered {exchange.status}", exchange)


@check("5", "JSON escapes and plain UTF-8 in a body mean the same.")
def escaped_body(session: Session) -> None:
    fields = session.chat_fields(max_tokens=2, messages=[{"role": "user", "content": "né 客单价 🦦"}])
    plain = session.post(CHAT, json.dumps(fields, ensure_ascii=False).encode())
    escaped = session.post(CHAT, json.dumps(fields).encode())
    for exchange in (plain, escaped):
        if exchange.status != 200:
            raise Wrong(f"answered {exchange.status}", exchange)
    counts = [exchange.json["usage"]["prompt_tokens"] for exchange in (plain, escaped)]
    if counts[0] != counts[1]:
        raise Wrong(f"{counts[0]} prompt tokens plain, {counts[1]} escaped", plain, escaped)


@check("5", "A client of HTTP/1.0, as proxies are by default, gets whole answer and stream without chunks.")
def http_1_0(session: Session) -> None:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if session.target.api_key:
        headers["Authorization"] = f"Bearer {session.target.api_key}"
    for stream in (False, True):
        body = encode(session.chat_fields(max_tokens=2, stream=stream))
        data = request_bytes(session.target.address, "POST", CHAT, headers, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        with session.connect() as connection:
            connection.send(data)
            reply = connection.reply("POST")
        exchange = Exchange("POST", CHAT, body, reply, headers={"HTTP version": "1.0"})
        if reply.status != 200:
            raise Wrong(f"answered {reply.status}", exchange)
        if reply.header("transfer-encoding"):
            raise Wrong(f"Transfer-Encoding is {reply.header('transfer-encoding')!r}", exchange)
        if stream and not reply.body.endswith(b"data: [DONE]\n\n"):
            raise Wrong(f"the stream ends with {reply.body[-40:]!r}", exchange)


@check("8", "More than 16 KiB of headers are refused, and the server lives on.")
def long_headers(session: Session) -> None:
    exchange = session.send("GET", "/v1/models", None, headers={"X-Long": "a" * 40_000}, record=False)
    if exchange.status == 200:
        raise Wrong("40,000 bytes of headers were taken", exchange)
    if exchange.status >= 500:
        raise Wrong(f"answered {exchange.status}", exchange)
