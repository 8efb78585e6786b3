"""Context and limits of prompts and answers."""

from __future__ import annotations

import re
from typing import Any

from headrace.lint.exchange import Exchange, refused
from headrace.lint.facts import routes
from headrace.lint.session import ROUTES, Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

SAYS = (
    r"[Tt]his model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens "
    r"\((\d+) in the (?:messages|prompt), (\d+) in the completion\)"
)


def _long_text(session: Session) -> str:
    context = session.facts.context(session)
    if context > 1_500_000:
        raise NotOffered("the context is longer than a body may be")
    return "a b c d " * (context // 2)


@check_each(
    "2", "A prompt longer than the context is a 400 context_length_exceeded with the numbers, on {case}.", routes()
)
def long_prompt(session: Session, route: str) -> None:
    context = session.facts.context(session)
    text = _long_text(session)
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if route == "chat" else {"prompt": text}
    for stream in (False, True):
        exchange = session.ask(route, stream=stream, **fields)
        refused(exchange, 400, code="context_length_exceeded")
        found = re.search(SAYS, str(exchange.error.get("message", "")))
        if found is None:
            raise Wrong("the message does not have the four numbers", exchange)
        most, asked, prompt, completion = map(int, found.groups())
        if most != context or asked != prompt + completion or prompt <= context:
            raise Wrong(f"numbers that cannot be: {found[0]}", exchange)


@check("2", "A prompt of as many tokens as the context is a 400, one less is answered with a token.")
def at_the_edge(session: Session) -> None:
    context = session.facts.context(session)
    if context > 40_000:
        raise NotOffered("the context is too long to fill here")
    token = session.facts.tokens(session, " a")[-1]
    refused(session.complete(prompt=[token] * context, max_tokens=1), 400, code="context_length_exceeded")


@check_each("2", "A limit beyond the room left is clamped and noted in x-clamped, or a 400, on {case}.", routes())
def clamped(session: Session, route: str) -> None:
    context = session.facts.context(session)
    for limit in (context, 10 * context, 2**31, 2**53):
        exchange = _begun(session, route, limit)
        if exchange.status != 200:
            refused(exchange, 400)
            continue
        note = re.fullmatch(r"(max_tokens|max_completion_tokens)=(\d+)", exchange.reply.header("x-clamped"))
        if note is None or not 0 < int(note[2]) < context:
            raise Wrong(f"max_tokens {limit}: x-clamped is {exchange.reply.header('x-clamped')!r}", exchange)


def _begun(session: Session, route: str, limit: int) -> Exchange:
    """An answer without end, left as soon as it has begun."""
    make = session.chat_fields if route == "chat" else session.completion_fields
    with session.opened("POST", ROUTES[route], make(max_tokens=limit, stream=True)) as reply:
        if reply.head().status != 200:
            reply.read()
        return reply.finish()


@check("2", "A limit within the room left is not clamped.")
def not_clamped(session: Session) -> None:
    exchange = session.chat(max_tokens=4)
    if exchange.reply.header("x-clamped"):
        raise Wrong(f"x-clamped: {exchange.reply.header('x-clamped')}", exchange)
