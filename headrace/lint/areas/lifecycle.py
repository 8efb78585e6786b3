"""Clients that leave, that do harm beside others, that come all at once."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from headrace.lint.answers import answer_of, differences
from headrace.lint.exchange import Exchange, accepted
from headrace.lint.session import CHAT, COMPLETIONS, Session
from headrace.lint.shapes import is_printable_id
from headrace.lint.verdicts import NotOffered, Wrong, check
from headrace.lint.wire import WireFault, request_bytes

HEALTH = ("/health", "/readyz", "/v1/models")
LOAD = 12


def _healthy(session: Session, after: str) -> None:
    """Raise Wrong unless the server answers a request and says that it is well."""
    exchange = session.chat(max_tokens=2)
    if exchange.status != 200:
        raise Wrong(f"after {after}: answered {exchange.status}", exchange)
    for path in HEALTH:
        exchange = session.get(path)
        if exchange.status not in (200, 404):
            raise Wrong(f"after {after}: {path} answered {exchange.status}", exchange)


@check("5", "A client that leaves amid a stream does no harm.", alone=True)
def left_a_stream(session: Session) -> None:
    for path, fields in ((CHAT, session.chat_fields), (COMPLETIONS, session.completion_fields)):
        for events in (0, 1, 2, 5):
            body = fields(stream=True, max_tokens=500, ignore_eos=True)
            with session.opened("POST", path, body) as reply:
                reply.read(events=events)
                reply.finish()
    _healthy(session, "streams that were left")


@check("5", "A client that leaves before its answer does no harm.", alone=True)
def left_before_the_answer(session: Session) -> None:
    for n in (1, 2):
        for _ in range(4):
            with session.opened("POST", CHAT, session.chat_fields(max_tokens=500, n=n, ignore_eos=True)):
                pass
    _healthy(session, "requests that were left")


@check("5", "Half a request, and bytes that are none, do no harm.", alone=True)
def half_requests(session: Session) -> None:
    whole = request_bytes(session.target.address, "POST", CHAT, {"Content-Type": "application/json"}, b'{"model": 1}')
    for data in (whole[:10], whole[:-5], b"\x16\x03\x01\x02\x00\x01", b"\r\n\r\n", b"GET\r\n\r\n", b"A" * 9000):
        with contextlib.suppress(WireFault), session.connect() as connection:
            connection.send(data)
    _healthy(session, "half requests")


@check("5", "A stream goes on undisturbed beside every kind of bad request, and the server stays well.", alone=True)
def survivor(session: Session) -> None:
    body = {"max_tokens": 150, "ignore_eos": True, "stream": True}
    lone = session.post(CHAT, session.chat_fields(**body))
    if lone.status != 200:
        body.pop("ignore_eos")
        lone = accepted(session.post(CHAT, session.chat_fields(**body)))
    with session.opened("POST", CHAT, session.chat_fields(**body)) as survivor:
        survivor.read(events=1)
        for exchange in _harm(session):
            if exchange.status >= 500 and exchange.status != 501:
                raise Wrong(f"a bad request answered {exchange.status}", exchange)
        survivor.read()
        beside = survivor.finish()
    session.facts.steady(session, "chat")
    if found := differences(answer_of(lone), answer_of(beside)):
        raise Wrong(f"the stream beside bad requests is another: {found[0]}", lone, beside)
    _healthy(session, "bad requests")


def _harm(session: Session) -> list[Exchange]:
    huge = 10**9
    chats: list[dict[str, Any]] = [
        {"logit_bias": {"191222000": -100}},
        {"logit_bias": {"AI": -100}},
        {"logit_bias": {str(key): 1 for key in range(2000)}},
        {"stop_token_ids": [huge]},
        {"stop_token_ids": list(range(200))},
        {"allowed_token_ids": list(range(2000))},
        {"bad_words": ["x" * 1000] * 500},
        {"stop": ["x"] * 10_000},
        {"n": 5_000_000},
        {"logprobs": True, "top_logprobs": huge},
        {"top_k": huge},
        {"min_tokens": huge},
        {"seed": 2**200},
        {"temperature": 1e300},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"chat_template_kwargs": {"a": {"b": ["c"] * 10_000}}},
    ]
    texts: list[dict[str, Any]] = [
        {"prompt": [-1]},
        {"prompt": [huge]},
        {"prompt": ["x"] * 100_000},
        {"logprobs": huge},
        {"prompt_logprobs": -1},
        {"best_of": 1_000_000},
        {"echo": True, "logprobs": huge},
    ]
    exchanges = [session.chat(**fields) for fields in chats] + [session.complete(**fields) for fields in texts]
    raws = (b"{", b"[" * 100_000, b'{"model": NaN}', b"\xff\xfe")
    return exchanges + [session.post(CHAT, data) for data in raws]


@check("5", "x-request-id of the client comes back when it is good, and one of the server's when it is not.")
def request_ids(session: Session) -> None:
    good = f"lint-{secrets.token_hex(4)}"
    for path in ("/v1/models", "/v1/unknown"):
        exchange = session.get(path, headers={"X-Request-Id": good})
        if exchange.reply.header("x-request-id") != good:
            raise Wrong(f"x-request-id is {exchange.reply.header('x-request-id')!r} where {good!r} is right", exchange)
    for stream in (False, True):
        exchange = session.post(CHAT, session.chat_fields(stream=stream), headers={"X-Request-Id": good})
        if exchange.reply.header("x-request-id") != good:
            raise Wrong(f"x-request-id is {exchange.reply.header('x-request-id')!r} where {good!r} is right", exchange)
    for bad in ("x" * 300, "a b\tc", "é", "x" * 9000):
        exchange = session.get("/v1/models", headers={"X-Request-Id": bad})
        given = exchange.reply.header("x-request-id")
        if exchange.status >= 500 or (exchange.status == 200 and not is_printable_id(given) and given != bad):
            raise Wrong(f"x-request-id is {given[:80]!r}", exchange)


@check("2", "The field request_id comes back as x-request-id.")
def request_id_field(session: Session) -> None:
    exchange = accepted(session.chat(request_id="lint-field-1"), "request_id")
    if exchange.reply.header("x-request-id") != "lint-field-1":
        raise Wrong(f"x-request-id is {exchange.reply.header('x-request-id')!r}", exchange)


@check("2", "Requests of the same id at the same time are all answered, under ids of their own.", alone=True)
def same_request_id(session: Session) -> None:
    bodies = [(CHAT, session.chat_fields(stream=stream)) for stream in (False, True)] * 3
    exchanges = session.together(bodies, headers={"X-Request-Id": "lint-twins"})
    for exchange in exchanges:
        accepted(exchange)
    ids = {exchange.events.chunks[0]["id"] if exchange.streamed else exchange.json["id"] for exchange in exchanges}
    if len(ids) < len(exchanges):
        raise Wrong(f"{len(exchanges)} answers have {len(ids)} ids", *exchanges[:2])


@check("3", "Greedy answers under load are those given alone, each to its own client.", alone=True)
def load(session: Session) -> None:
    session.facts.steady(session, "chat")
    prompts = [f"Repeat the number {number} and count on from there." for number in range(100, 100 + LOAD)]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number, prompt in enumerate(prompts):
        options = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        messages = [{"role": "user", "content": prompt}]
        bodies.append((CHAT, session.chat_fields(messages=messages, max_tokens=12 + number, **options)))
    alone = [answer_of(session.post(path, body)) for path, body in bodies]
    for _ in range(2):
        crowd = [answer_of(exchange) for exchange in session.together(bodies)]
        for one, other in zip(alone, crowd, strict=True):
            if found := differences(one, other):
                raise Wrong(f"under load: {found[0]}", one.exchange, other.exchange)


@check("3", "Beside clients that leave, answers are those given alone.", alone=True)
def load_with_leavers(session: Session) -> None:
    session.facts.steady(session, "chat")
    body = session.chat_fields(max_tokens=24)
    lone = answer_of(session.post(CHAT, body))
    for _ in range(3):
        with contextlib.ExitStack() as leaving:
            for _ in range(4):
                fields = session.chat_fields(max_tokens=300, stream=True, ignore_eos=True)
                leaving.enter_context(session.opened("POST", CHAT, fields)).head()
            beside = answer_of(session.post(CHAT, body))
        if found := differences(lone, beside):
            raise Wrong(f"beside leavers: {found[0]}", lone.exchange, beside.exchange)
    _healthy(session, "leavers")


@check("5", "At the end the server is well and answers as in the beginning.", alone=True)
def well_at_the_end(session: Session) -> None:
    _healthy(session, "all of it")
    try:
        first = session.facts.reference(session, "chat")
        session.facts.steady(session, "chat")
    except NotOffered:
        return
    if found := differences(first, answer_of(session.chat(max_tokens=40))):
        raise Wrong(f"other than in the beginning: {found[0]}", first.exchange)
