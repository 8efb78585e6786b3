"""Bodies that are not what they should be: each is a 400, and nothing breaks."""

from __future__ import annotations

from headrace.lint.exchange import refused
from headrace.lint.facts import tokenize
from headrace.lint.session import ROUTES, Session, encode
from headrace.lint.verdicts import NotOffered, Wrong, check_each

NOT_OBJECTS = {
    "empty body": b"",
    "blank body": b"  \n",
    "half an object": b'{"model": "x", "messages": [',
    "array": b"[]",
    "string": b'"hello"',
    "number": b"42",
    "null": b"null",
    "not JSON": b"model=x",
    "trailing bytes": b'{"model": "x"} {"model": "y"}',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "a NUL": b'{"model": "x\x00"}',
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and closed": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}
"""Refused on every route that takes a body."""

ODD_VALUES = {
    "NaN": b'"temperature": NaN',
    "Infinity": b'"temperature": Infinity',
    "minus Infinity": b'"top_p": -Infinity',
    "a number beyond all floats": b'"temperature": 1e999',
    "a huge integer": b'"priority": ' + b"9" * 400,
    "a huge negative seed": b'"seed": -' + b"9" * 400,
    "2^63": b'"seed": 9223372036854775808',
    "2^64": b'"seed": 18446744073709551616',
    "a float limit": b'"max_tokens": 1.5',
    "5 million choices": b'"n": 5000000',
    "an array for a number": b'"temperature": [1]',
    "an object for a number": b'"max_tokens": {"a": 1}',
    "true for a number": b'"max_tokens": true',
    "a string for a flag": b'"stream": "yes"',
    "a number for options": b'"stream": true, "stream_options": 5',
}
"""Added to an otherwise good request."""

SURVIVED = {
    "a lone surrogate": b'"user": "\\ud800"',
    "a lone surrogate in a stop string": b'"stop": ["\\udc00"]',
    "a NUL in a string": b'"user": "a\\u0000b"',
    "keys of odd characters": b'"a\\r\\nx-evil: 1": 1, "\\ud83e": 2, "": 3',
    "the same key twice": b'"user": "a", "user": "b"',
    "a million spaces": b" " * 1_000_000 + b'"user": "a"',
    "deep metadata": b'"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep in an unknown field": b'"zebra_stripes": ' + b"[" * 50_000 + b"]" * 50_000,
    "negative zero": b'"temperature": -0.0',
}
"""May be taken or refused, and breaks nothing."""


@check_each("5", "{case}: a 400 on every route that takes a body.", NOT_OBJECTS)
def body(session: Session, data: bytes) -> None:
    paths = [*ROUTES.values()]
    try:
        tokenize(session, prompt="x")
        paths += ["/v1/tokenize", "/v1/detokenize"]
    except NotOffered:
        pass
    for path in paths:
        exchange = session.post(path, data)
        if exchange.status == 404 and path not in ROUTES.values():
            continue
        refused(exchange, 400)


def _with(session: Session, route: str, addition: bytes) -> bytes:
    fields = session.chat_fields() if route == "chat" else session.completion_fields()
    name = addition[1 : addition.index(b'"', 1)].decode() if addition.startswith(b'"') else ""
    fields.pop(name, None)
    return encode(fields)[:-1] + b", " + addition + b"}"


@check_each("5", "{case}: a 400 on both routes.", ODD_VALUES)
def value(session: Session, addition: bytes) -> None:
    for route, path in ROUTES.items():
        refused(session.post(path, _with(session, route, addition)), 400)


@check_each("5", "{case}: taken or a 400, never a 5xx, and no header of the client's making.", SURVIVED)
def survived(session: Session, addition: bytes) -> None:
    for route, path in ROUTES.items():
        exchange = session.post(path, _with(session, route, addition))
        if exchange.status != 200:
            refused(exchange, 400)
        if exchange.reply.header("x-evil"):
            raise Wrong("a header of the client's making", exchange)


@check_each("5", "A lone surrogate in the text of {case} is taken or a 400.", {name: name for name in ROUTES})
def lone_surrogate(session: Session, route: str) -> None:
    for text in ("\ud83e", "a\udda6b", "\udda6\ud83e"):
        fields = {"messages": [{"role": "user", "content": text}]} if route == "chat" else {"prompt": text}
        for stream in (False, True):
            exchange = session.ask(route, stream=stream, max_tokens=2, **fields)
            if exchange.status != 200:
                refused(exchange, 400)
