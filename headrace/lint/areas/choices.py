"""Several choices of one request."""

from __future__ import annotations

from typing import Any

from headrace.lint.answers import Answer, answer_of
from headrace.lint.facts import routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check_each


def _several(session: Session, route: str, stream: bool, **fields: Any) -> Answer:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return answer_of(session.ask(route, **fields, **options), "n")


@check_each("3", "n choices have the indexes 0 … n−1 and each its finish_reason on {case}.", routes())
def indexes(session: Session, route: str) -> None:
    for stream in (False, True):
        for n in (2, 4):
            answer = _several(session, route, stream, n=n, temperature=1, seed=1)
            if [choice.index for choice in answer.choices] != list(range(n)):
                raise Wrong(f"indexes {[choice.index for choice in answer.choices]}", answer.exchange)
            if any(choice.finish_reason is None for choice in answer.choices):
                raise Wrong("a choice without finish_reason", answer.exchange)


@check_each("3", "Greedy choices are all the same, and as one alone, or n > 1 is a 400, on {case}.", routes())
def greedy(session: Session, route: str) -> None:
    session.facts.steady(session, route)
    alone = answer_of(session.ask(route))
    exchange = session.ask(route, n=3)
    if exchange.status == 400:
        raise NotOffered(str(exchange.error.get("message", ""))[:120])
    answer = answer_of(exchange, "n")
    if [choice.text for choice in answer.choices] != [alone.text] * 3:
        raise Wrong("three greedy choices are not one answer", alone.exchange, exchange)


@check_each("2", "Seeded choices differ from each other and are the same again on {case}.", routes())
def seeded(session: Session, route: str) -> None:
    session.facts.samples(session, route)
    first, again = (
        _several(session, route, stream, n=4, temperature=1.8, seed=7, max_tokens=24) for stream in (False, True)
    )
    texts = [choice.text for choice in first.choices]
    if len(set(texts)) == 1:
        raise Wrong("all choices of a seed are the same", first.exchange)
    if texts != [choice.text for choice in again.choices]:
        raise Wrong("the same seed gives other choices", first.exchange, again.exchange)


@check_each("4", "Completion tokens are summed over choices, the prompt counts once, on {case}.", routes())
def usage(session: Session, route: str) -> None:
    alone = _several(session, route, False)
    for stream in (False, True):
        answer = _several(session, route, stream, n=3, temperature=0.5, seed=2, ignore_eos=True, max_tokens=5)
        if answer.tokens() != 15:
            raise Wrong(f"{answer.tokens()} tokens of 3 choices of 5", answer.exchange)
        if answer.tokens("prompt_tokens") != alone.tokens("prompt_tokens"):
            raise Wrong(f"{answer.tokens('prompt_tokens')} prompt tokens", alone.exchange, answer.exchange)


@check_each("3", "A choice goes on when another has ended, on {case}.", routes())
def ends_apart(session: Session, route: str) -> None:
    session.facts.samples(session, route)
    for stream in (False, True):
        answer = _several(session, route, stream, n=4, temperature=1.5, seed=3, stop=["e", "a"], max_tokens=40)
        if any(choice.finish_reason not in ("stop", "length") for choice in answer.choices):
            raise Wrong(f"finish reasons {[choice.finish_reason for choice in answer.choices]}", answer.exchange)
