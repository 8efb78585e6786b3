"""Streams: order, usage, ends. Framing and envelopes of every stream are judged where every reply is."""

from __future__ import annotations

from typing import Any

from headrace.lint.answers import answer_of
from headrace.lint.exchange import Exchange, accepted, refused
from headrace.lint.facts import routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

USAGE = {"include_usage": True}


def _stream(session: Session, route: str, **fields: Any) -> Exchange:
    exchange = accepted(session.ask(route, stream=True, **fields))
    if not exchange.streamed:
        raise Wrong(f"stream: true gives {exchange.reply.header('content-type')!r}", exchange)
    if not exchange.events.chunks:
        raise Wrong("a stream without chunks", exchange)
    return exchange


@check_each("3", "stream: true gives an event stream on {case}.", routes())
def is_a_stream(session: Session, route: str) -> None:
    _stream(session, route)


@check_each("3", "stream false or null gives one JSON object on {case}.", routes())
def is_no_stream(session: Session, route: str) -> None:
    for value in (False, None, ...):
        exchange = accepted(session.ask(route, stream=value))
        if exchange.streamed:
            raise Wrong("an event stream without stream: true", exchange)


@check_each("3", "An answer of 40 tokens comes in more than one piece on {case}.", routes())
def in_pieces(session: Session, route: str) -> None:
    session.facts.reference(session, route)
    exchange = _stream(session, route, max_tokens=40)
    said = [c for chunk in exchange.events.chunks for c in chunk["choices"] if c.get("text") or _content(c)]
    if len(said) < 2:
        raise Wrong("all text in one delta", exchange)


def _content(choice: dict[str, Any]) -> bool:
    return bool((choice.get("delta") or {}).get("content"))


@check_each("3", "No delta repeats the text so far on {case}.", routes())
def deltas_not_sums(session: Session, route: str) -> None:
    whole = session.facts.reference(session, route)
    session.facts.steady(session, route)
    answer = answer_of(_stream(session, route, max_tokens=40))
    if answer.text != whole.text:
        raise Wrong("the deltas do not add up to the whole answer", whole.exchange, answer.exchange)


@check_each("3", "The usage chunk comes with include_usage on {case}, and without it there is none.", routes())
def usage_when_asked(session: Session, route: str) -> None:
    asked = _stream(session, route, stream_options=USAGE)
    if not any(chunk.get("usage") for chunk in asked.events.chunks):
        raise Wrong("include_usage gives no usage", asked)
    for options in (..., None, {"include_usage": False}, {}):
        _stream(session, route, stream_options=options)


@check_each("3", "With continuous_usage_stats every chunk has the running usage on {case}, never falling.", routes())
def continuous_usage(session: Session, route: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    exchange = session.ask(route, stream=True, stream_options=options)
    accepted(exchange, "stream_options.continuous_usage_stats")
    counts = [(chunk.get("usage") or {}).get("completion_tokens") for chunk in exchange.events.chunks]
    known = [count for count in counts if isinstance(count, int)]
    if counts != sorted(known):
        raise Wrong(f"running counts are {counts}", exchange)


@check_each("4", "stream_options without stream on {case} is a 400.", routes())
def options_without_stream(session: Session, route: str) -> None:
    for stream in (..., False):
        refused(session.ask(route, stream=stream, stream_options=USAGE), 400, param="stream_options")


@check_each(
    "3", "A stream cut by its limit finishes with length on {case}, one that ends by itself with stop.", routes()
)
def finish_reasons(session: Session, route: str) -> None:
    for limit in (1, 2, 5):
        answer = answer_of(_stream(session, route, max_tokens=limit, stream_options=USAGE))
        if answer.finish_reason not in ("length", "stop"):
            raise Wrong(f"finish_reason is {answer.finish_reason!r}", answer.exchange)
        if answer.finish_reason == "length" and answer.tokens() != limit:
            raise Wrong(f"length after {answer.tokens()} of {limit} tokens", answer.exchange)


@check("3", "An answer that ends by itself has finish_reason stop in both transports.")
def natural_end(session: Session) -> None:
    messages = [{"role": "user", "content": "Reply with the single word yes."}]
    for stream in (False, True):
        answer = answer_of(session.chat(messages=messages, max_tokens=160, stream=stream))
        if answer.finish_reason == "length":
            raise NotOffered("the model does not come to an end")
        if answer.finish_reason != "stop":
            raise Wrong(f"finish_reason is {answer.finish_reason!r}", answer.exchange)


@check("3", "Completions chunks have no delta and no role.")
def text_chunks(session: Session) -> None:
    exchange = _stream(session, "completions")
    for chunk in exchange.events.chunks:
        if any("delta" in choice or "role" in choice for choice in chunk["choices"]):
            raise Wrong("a completions chunk with delta or role", exchange)


@check("3", "system_fingerprint is the same in both transports.")
def same_fingerprint(session: Session) -> None:
    whole, streamed = accepted(session.chat()), _stream(session, "chat")
    marks = [whole.json.get("system_fingerprint"), streamed.events.chunks[0].get("system_fingerprint")]
    if marks[0] != marks[1]:
        raise Wrong(f"{marks[0]!r} and {marks[1]!r}", whole, streamed)


@check("3", "Tools and reasoning leave no keys in a plain answer.")
def plain_keys(session: Session) -> None:
    message = accepted(session.chat()).json["choices"][0]["message"]
    if extra := {"tool_calls", "function_call", "audio", "annotations"} & message.keys():
        raise Wrong(f"a plain message has {', '.join(sorted(extra))}", *([session.last] if session.last else []))
