"""Fields that no one knows."""

from __future__ import annotations

from headrace.lint.exchange import Exchange, refused
from headrace.lint.facts import routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

TYPOS = {"temprature": "temperature", "max_token": "max_tokens", "top-p": "top_p", "Stream": "stream"}


def _names(exchange: Exchange) -> list[str]:
    return [name.strip() for name in exchange.reply.header("x-ignored-fields").split(",") if name.strip()]


@check_each(
    "2", "{case}, nearly a known name, is a 400 that asks whether that was meant.", {name: name for name in TYPOS}
)
def typo(session: Session, name: str) -> None:
    for route in routes():
        refused(session.ask(route, **{name: 1}), 400, param=name, says=rf"(?i)did you mean.*{TYPOS[name]}")


@check_each("2", "A literal extra_body on {case} is a 400 that says to merge it.", routes())
def extra_body(session: Session, route: str) -> None:
    refused(session.ask(route, extra_body={"top_k": 1}), 400, param="extra_body", says=r"(?i)merge|top level")


@check_each("2", "An unknown field on {case} is ignored and named in x-ignored-fields.", routes())
def named_in_header(session: Session, route: str) -> None:
    for stream in (False, True):
        exchange = session.ask(route, zebra_stripes=7, stream=stream)
        if exchange.status == 400:
            refused(exchange, 400, says="zebra_stripes")
            raise NotOffered("the server refuses every unknown field")
        if exchange.status != 200:
            raise Wrong(f"answered {exchange.status}", exchange)
        if "zebra_stripes" not in _names(exchange):
            raise Wrong("dropped without a word", exchange)


@check("2", "x-ignored-fields is bounded and escaped: 16 names of 64 characters.")
def bounded_header(session: Session) -> None:
    odd = {f"unknown_zebra_{number:03}": number for number in range(40)}
    odd |= {"zebra " + "z" * 300: 1, "zebra\r\nx-evil: 1": 1, "zebra,comma": 1, "zebra🦓": 1}
    exchange = session.chat(**dict(reversed(odd.items())))
    if exchange.status == 400:
        raise NotOffered("the server refuses every unknown field")
    if exchange.status != 200 or exchange.reply.header("x-evil"):
        raise Wrong(f"answered {exchange.status}", exchange)
    names = _names(exchange)
    if not names:
        raise Wrong("dropped without a word", exchange)
    if len(names) > 16 or any(len(name) > 64 or not name.isascii() for name in names):
        raise Wrong(f"{len(names)} names, the longest of {max(map(len, names))} characters", exchange)


@check("2", "A request without unknown fields has no x-ignored-fields.")
def absent_header(session: Session) -> None:
    exchange = session.chat(user="u", seed=1)
    if exchange.status == 200 and _names(exchange):
        raise Wrong(f"x-ignored-fields: {_names(exchange)}", exchange)
