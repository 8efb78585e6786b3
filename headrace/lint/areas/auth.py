"""Keys, when one was given."""

from __future__ import annotations

from headrace.lint.exchange import offered_route, refused
from headrace.lint.session import CHAT, COMPLETIONS, Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

GUARDED = {
    "chat": ("POST", CHAT),
    "completions": ("POST", COMPLETIONS),
    "models": ("GET", "/v1/models"),
    "one model": ("GET", "/v1/models/x"),
    "tokenize": ("POST", "/v1/tokenize"),
    "chat without v1": ("POST", "/chat/completions"),
    "render": ("POST", "/v1/chat/completions/render"),
    "load": ("GET", "/load"),
    "version": ("GET", "/version"),
    "metrics": ("GET", "/metrics"),
}

OPEN = {path: path for path in ("/livez", "/readyz", "/health")}

DISGUISES = (
    "//v1/models",
    "/V1/models",
    "/v1/./models",
    "/v1/../v1/models",
    "/%76%31/models",
    "/v1/models/",
    "/health/../v1/models",
)


def _needs_key(session: Session) -> None:
    if not session.target.api_key:
        raise NotOffered("no key was given")
    if session.get("/v1/models", key=False).status == 200 and session.post(CHAT, b"{}", key=False).status != 401:
        raise NotOffered("the server asks for no key")


@check_each("5", "{case}: no key and a wrong key are a 401 invalid_api_key.", GUARDED)
def guarded(session: Session, case: tuple[str, str]) -> None:
    _needs_key(session)
    method, path = case
    body = b"{}" if method == "POST" else None
    exchange = session.send(method, path, body)
    if exchange.status != 403:
        offered_route(exchange)
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic eDp4"},
        {"Authorization": f"Bearer {session.target.api_key}x"},
        {"Authorization": session.target.api_key[:-1]},
    ):
        refused(session.send(method, path, body, headers=headers, key=False), 401, code="invalid_api_key")


@check_each("8", "{case} needs no key.", OPEN)
def open_probe(session: Session, path: str) -> None:
    _needs_key(session)
    exchange = session.get(path, key=False)
    if exchange.status == 401:
        raise Wrong("answered 401", exchange)


@check("8", "The right key opens, whatever the case of its scheme.")
def right_key(session: Session) -> None:
    _needs_key(session)
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {session.target.api_key}"}
        exchange = session.get("/v1/models", headers=headers, key=False)
        if exchange.status != 200:
            raise Wrong(f"answered {exchange.status}", exchange)


@check("8", "No spelling of a path goes around the key.")
def disguised_paths(session: Session) -> None:
    _needs_key(session)
    for path in DISGUISES:
        exchange = session.get(path, key=False)
        if exchange.status < 400 and exchange.status not in (301, 307, 308):
            raise Wrong(f"answered {exchange.status} without a key", exchange)


@check("8", "A body is not judged before the key is.")
def key_before_body(session: Session) -> None:
    _needs_key(session)
    refused(session.post(CHAT, b"{", key=False), 401)


@check("8", "OPTIONS needs no key.")
def options(session: Session) -> None:
    _needs_key(session)
    exchange = session.send("OPTIONS", CHAT, None, key=False)
    if exchange.status == 401:
        raise Wrong("answered 401", exchange)
