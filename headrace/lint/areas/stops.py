"""Stop strings and stop ids, judged against what the model says without them."""

from __future__ import annotations

from typing import Any

from headrace.lint.answers import Answer, answer_of
from headrace.lint.exchange import refused
from headrace.lint.facts import REFERENCE_TOKENS, routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

LENGTHS = (1, 2, 5, 11)


def _reference(session: Session, route: str) -> Answer:
    session.facts.steady(session, route)
    return session.facts.reference(session, route)


def _both(session: Session, route: str, **fields: Any) -> list[Answer]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    shared = {"max_tokens": REFERENCE_TOKENS, **fields}
    return [answer_of(session.ask(route, **shared, **extra), *fields) for extra in ({}, options)]


def _expect(answer: Answer, text: str, stop: object, whole: Answer) -> None:
    if answer.text != text:
        raise Wrong(
            f"stop {stop!r}: text {answer.text[-40:]!r} where …{text[-40:]!r} is right", whole.exchange, answer.exchange
        )
    if answer.finish_reason != "stop":
        raise Wrong(f"stop {stop!r}: finish_reason is {answer.finish_reason!r}", answer.exchange)
    if answer.tokens() > whole.tokens():
        raise Wrong(f"stop {stop!r}: {answer.tokens()} tokens", answer.exchange)


def _pieces(text: str) -> list[str]:
    """Substrings of several lengths from several places; a piece counts from where it first occurs."""
    starts = (0, len(text) // 3, len(text) // 2)
    pieces = (text[start : start + length] for start in starts for length in LENGTHS)
    return list(dict.fromkeys(piece for piece in pieces if piece and "\ufffd" not in piece))


@check_each(
    "3",
    "A stop string of any length, wherever tokens end, cuts right before it on {case}, in both transports.",
    routes(),
)
def cuts_before(session: Session, route: str) -> None:
    whole = _reference(session, route)
    for stop in _pieces(whole.text):
        for answer in _both(session, route, stop=[stop]):
            _expect(answer, whole.text[: whole.text.index(stop)], stop, whole)


@check_each("2", "include_stop_str_in_output keeps the stop string and nothing after it, on {case}.", routes())
def kept(session: Session, route: str) -> None:
    whole = _reference(session, route)
    for stop in _pieces(whole.text)[::3]:
        for answer in _both(session, route, stop=stop, include_stop_str_in_output=True):
            _expect(answer, whole.text[: whole.text.index(stop) + len(stop)], stop, whole)


@check_each("2", "A string and a list of one stop are the same on {case}; null and [] are none.", routes())
def forms(session: Session, route: str) -> None:
    whole = _reference(session, route)
    stop = whole.text[len(whole.text) // 2 :][:3]
    for form in (stop, [stop]):
        for answer in _both(session, route, stop=form):
            _expect(answer, whole.text[: whole.text.index(stop)], form, whole)
    absent: tuple[Any, ...] = (None, [])
    for none in absent:
        for answer in _both(session, route, stop=none):
            if answer.text != whole.text:
                raise Wrong(f"stop {none!r} changes the text", whole.exchange, answer.exchange)


@check_each("3", "Of several stop strings the one that is complete first cuts, on {case}.", routes())
def several(session: Session, route: str) -> None:
    whole = _reference(session, route)
    early, late = whole.text[3:5], whole.text[len(whole.text) * 2 // 3 :][:4]
    cut = min(whole.text.index(early), whole.text.index(late))
    for answer in _both(session, route, stop=[late, "@@never@@", early]):
        _expect(answer, whole.text[:cut], [late, early], whole)


@check_each("3", "Text that only began like a stop string is sent after all, on {case}.", routes())
def held_back(session: Session, route: str) -> None:
    whole = _reference(session, route)
    for end in (1, len(whole.text) // 2, len(whole.text)):
        stop = whole.text[max(0, end - 4) : end] + "\u0001never"
        for answer in _both(session, route, stop=[stop]):
            if answer.text != whole.text:
                raise Wrong(
                    f"stop {stop!r} that never comes: text ends {answer.text[-40:]!r}", whole.exchange, answer.exchange
                )


@check_each("3", "stop_reason says which string stopped on {case}.", routes())
def stop_reason(session: Session, route: str) -> None:
    whole = _reference(session, route)
    stop = whole.text[4:7]
    for answer in _both(session, route, stop=["@@never@@", stop]):
        reason = answer.choices[0].stop_reason
        if reason is None:
            raise NotOffered("no stop_reason")
        if reason != stop:
            raise Wrong(f"stop_reason is {reason!r} where {stop!r} is right", answer.exchange)


@check_each("2", "A stop id ends the answer and its text is not in it, on {case}.", routes())
def stop_ids(session: Session, route: str) -> None:
    whole = _reference(session, route)
    options = {"max_tokens": REFERENCE_TOKENS, "return_token_ids": True}
    ids = answer_of(session.ask(route, **options), "return_token_ids").choices[0].token_ids
    if not ids:
        raise NotOffered("no token_ids in the answer")
    stop = ids[len(ids) // 2]
    count = ids.index(stop) + 1
    for answer in _both(session, route, stop_token_ids=[stop]):
        if answer.finish_reason != "stop" or answer.tokens() != count:
            raise Wrong(
                f"id {stop} at {count}: {answer.finish_reason!r} after {answer.tokens()} tokens", answer.exchange
            )
        if not whole.text.startswith(answer.text.rstrip("\ufffd")) or answer.text == whole.text:
            raise Wrong("the text does not end before the stop id", whole.exchange, answer.exchange)
        if answer.choices[0].stop_reason not in (None, stop):
            raise Wrong(f"stop_reason is {answer.choices[0].stop_reason!r} where {stop} is right", answer.exchange)


@check_each("2", "min_tokens outlasts a stop string on {case}.", routes())
def min_tokens(session: Session, route: str) -> None:
    whole = _reference(session, route)
    for answer in _both(session, route, stop=[whole.text[:2]], min_tokens=12):
        if answer.tokens() < 12:
            raise Wrong(f"{answer.tokens()} tokens with min_tokens 12", answer.exchange)


@check("8", "64 stop strings are taken, 65 and one of more than 256 bytes are a 400.")
def limits(session: Session) -> None:
    exchange = session.chat(stop=[f"@@{number}" for number in range(64)])
    refused(session.chat(stop=[f"@@{number}" for number in range(65)]), 400, param="stop")
    refused(session.chat(stop=["é" * 200]), 400, param="stop")
    if exchange.status == 400:
        raise NotOffered(str(exchange.error.get("message", ""))[:120])
    if exchange.status != 200:
        raise Wrong(f"answered {exchange.status} to 64 stop strings", exchange)
