"""Errors of requests that are well-formed HTTP and JSON."""

from __future__ import annotations

from headrace.lint.exchange import offered_route, refused
from headrace.lint.facts import routes
from headrace.lint.session import CHAT, COMPLETIONS, ROUTES, Session, encode
from headrace.lint.verdicts import Wrong, check, check_each

GET_ROUTES = ("/v1/models", "/health", "/livez", "/readyz", "/version", "/load")
BODY_LIMIT = 8 << 20


@check("5", "An unknown route is a 404 route_not_found.")
def unknown_route(session: Session) -> None:
    for method, path in (("GET", "/v1/unknown"), ("POST", "/v1/unknown"), ("GET", "/nothing/here"), ("DELETE", "/v2")):
        refused(session.send(method, path, b"{}" if method == "POST" else None), 404, code="route_not_found")


@check_each("5", "A wrong method on {case} is a 405 that says what is allowed.", routes())
def wrong_method(session: Session, route: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        exchange = session.send(method, ROUTES[route], None if method in ("GET", "DELETE") else b"{}")
        refused(exchange, 405)
        if "POST" not in exchange.reply.header("allow"):
            raise Wrong(f"Allow is {exchange.reply.header('allow')!r}", exchange)


@check_each("5", "POST on {case} is a 405.", {path: path for path in GET_ROUTES})
def post_where_get_is_right(session: Session, path: str) -> None:
    offered_route(session.get(path))
    refused(session.post(path, b"{}"), 405)


@check_each("5", "Another content type on {case} is a 415 that shows the right header.", routes())
def content_type(session: Session, route: str) -> None:
    body = encode(session.chat_fields() if route == "chat" else session.completion_fields())
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
    ):
        exchange = session.post(ROUTES[route], body, headers={"Content-Type": kind})
        refused(exchange, 415, says=r"(?i)content-type: *application/json")


@check_each("5", "A body that is too large on {case} is a 413.", routes())
def large_body(session: Session, route: str) -> None:
    padding = "a" * (BODY_LIMIT + (1 << 20))
    body = encode(session.chat_fields() if route == "chat" else session.completion_fields())
    data = body[:-1] + b', "user": "' + padding.encode() + b'"}'
    refused(session.post(ROUTES[route], data), 413)


@check("5", "A body that says it is too large is refused before it is sent.")
def large_body_declared(session: Session) -> None:
    exchange = session.post(CHAT, b"{", headers={"Content-Length": str(60 << 20)}, patience=5.0)
    refused(exchange, 413)


@check_each("5", "An unknown model on {case} is a 404 model_not_found, in a stream too.", routes())
def unknown_model(session: Session, route: str) -> None:
    for stream in (False, True):
        refused(session.ask(route, model="no-such-model", stream=stream), 404, code="model_not_found", param="model")
    refused(session.ask(route, model=f" {session.target.model}"), 404, code="model_not_found")


@check_each("5", "A missing model on {case} is a 400 that names it.", routes())
def missing_model(session: Session, route: str) -> None:
    refused(session.ask(route, model=...), 400, code="missing_required_parameter", param="model")
    refused(session.ask(route, model=5), 400, param="model")
    refused(session.ask(route, model=None), 400, param="model")


@check("5", "Missing messages are a 400 missing_required_parameter.")
def missing_messages(session: Session) -> None:
    refused(session.chat(messages=...), 400, code="missing_required_parameter", param="messages")


@check("5", "A missing prompt is a 400 missing_required_parameter.")
def missing_prompt(session: Session) -> None:
    refused(session.complete(prompt=...), 400, code="missing_required_parameter", param="prompt")


@check_each(
    "5", "An error known before the first token has its status and a JSON body in a stream too, on {case}.", routes()
)
def errors_before_a_stream(session: Session, route: str) -> None:
    for fields in ({"temperature": 9}, {"max_tokens": -5}, {"model": "no-such-model"}, {"stop": 5}):
        exchange = session.ask(route, stream=True, **fields)
        refused(exchange, (400, 404))
        if exchange.streamed:
            raise Wrong("an event stream under an error status", exchange)


@check("5", "An error does not repeat what was sent: 2,000 wrong parts give a short body.")
def no_amplification(session: Session) -> None:
    parts = [{"type": "text", "text": 5, "padding": "p" * 200} for _ in range(2000)]
    exchange = session.chat(messages=[{"role": "user", "content": parts}])
    refused(exchange, 400)
    if len(exchange.reply.body) > 16 << 10:
        raise Wrong(f"an error body of {len(exchange.reply.body)} bytes", exchange)


@check("5", "The message of an error names field and bound.")
def message_names_bound(session: Session) -> None:
    refused(session.chat(temperature=3), 400, param="temperature", says=r"2")
    refused(session.complete(top_p=7), 400, param="top_p", says=r"1")


@check("5", "Odd query strings and trailing slashes never give a 5xx.")
def odd_paths(session: Session) -> None:
    for path in (
        "/v1/models?x=%ff",
        "/v1/models/",
        "//v1/models",
        "/v1/%2e%2e/health",
        "/%00",
        "/v1/models?" + "a" * 4000,
    ):
        exchange = session.get(path)
        if exchange.status >= 500:
            raise Wrong(f"answered {exchange.status}", exchange)


@check("5", "OPTIONS never gives a 5xx.")
def options(session: Session) -> None:
    for path in (CHAT, COMPLETIONS, "/v1/models"):
        exchange = session.send("OPTIONS", path, None)
        if exchange.status >= 500:
            raise Wrong(f"answered {exchange.status}", exchange)
