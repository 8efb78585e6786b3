"""Which routes there are."""

from __future__ import annotations

from headrace.lint.exchange import accepted, offered_route, refused, unsupported
from headrace.lint.facts import routes as text_routes
from headrace.lint.session import ROUTES, Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

LATER: dict[str, tuple[str, dict[str, object]]] = {
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "load_lora_adapter": ("/v1/load_lora_adapter", {}),
    "unload_lora_adapter": ("/v1/unload_lora_adapter", {}),
    "files": ("/v1/files", {}),
    "batches": ("/v1/batches", {}),
}

IN_SCHEMA = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/tokenize", "/v1/detokenize", "/health")


@check_each("1", "POST {case} answers.", text_routes())
def generation(session: Session, route: str) -> None:
    exchange = session.ask(route, max_tokens=2)
    if exchange.status != 200:
        raise Wrong(f"answered {exchange.status}", exchange)


@check_each("1", "POST {case} answers without /v1 too.", text_routes())
def without_v1(session: Session, route: str) -> None:
    fields = session.chat_fields(max_tokens=2) if route == "chat" else session.completion_fields(max_tokens=2)
    accepted(offered_route(session.post(ROUTES[route].removeprefix("/v1"), fields)))


@check_each(
    "1", "GET {case} is 200 while the model is ready.", {path: path for path in ("/livez", "/readyz", "/health")}
)
def probe(session: Session, path: str) -> None:
    accepted(offered_route(session.get(path)))


@check("1", "/metrics is Prometheus text.")
def metrics(session: Session) -> None:
    exchange = accepted(offered_route(session.get("/metrics")))
    kind = exchange.reply.header("content-type")
    if not kind.startswith(("text/plain", "application/openmetrics-text")):
        raise Wrong(f"content type {kind!r}", exchange)
    for line in exchange.reply.body.decode("utf-8", "replace").splitlines():
        if line and not line.startswith("#") and not _is_sample(line):
            raise Wrong(f"a line that is no sample: {line[:80]!r}", exchange)


def _is_sample(line: str) -> bool:
    value = line.rpartition("}")[2].split() if "}" in line else line.split()[1:]
    try:
        float(value[0])
    except (IndexError, ValueError):
        return False
    return True


@check_each("1", "GET {case} is a JSON object.", {path: path for path in ("/version", "/load")})
def about(session: Session, path: str) -> None:
    _ = accepted(offered_route(session.get(path))).json


@check("1", "/openapi.json has every route and names its errors.")
def openapi(session: Session) -> None:
    exchange = accepted(offered_route(session.get("/openapi.json")))
    body = exchange.json
    paths = body.get("paths")
    if not str(body.get("openapi", "")).startswith("3.") or not isinstance(paths, dict):
        raise Wrong("not an OpenAPI 3 description", exchange)
    if missing := [path for path in IN_SCHEMA if path not in paths]:
        raise Wrong(f"no {', '.join(missing)} in it", exchange)
    for path in ROUTES.values():
        operation = paths[path].get("post", {})
        if "requestBody" not in operation:
            raise Wrong(f"{path} has no request body in it", exchange)
        if "400" not in operation.get("responses", {}):
            raise Wrong(f"{path} has no 400 in it", exchange)


@check("1", "/docs is a page.")
def docs(session: Session) -> None:
    exchange = accepted(offered_route(session.get("/docs")))
    if "html" not in exchange.reply.header("content-type"):
        raise Wrong(f"content type {exchange.reply.header('content-type')!r}", exchange)


@check_each("1", "{case} is offered, or says 404 route_not_offered.", LATER)
def later(session: Session, case: tuple[str, dict[str, object]]) -> None:
    path, body = case
    exchange = session.post(path, {"model": session.target.model, **body})
    if exchange.status < 400:
        return
    if exchange.status in (404, 405) or unsupported(exchange):
        if exchange.status == 404 and exchange.error.get("code") == "route_not_found":
            refused(exchange, 404, code="route_not_offered")
        raise NotOffered(f"answered {exchange.status}")
    if exchange.status >= 500:
        raise Wrong(f"answered {exchange.status}", exchange)


@check_each("1", "HEAD {case} has the headers of GET and no body.", {path: path for path in ("/health", "/livez")})
def head(session: Session, path: str) -> None:
    exchange = session.send("HEAD", path, None)
    if exchange.status == 405:
        raise NotOffered("HEAD is refused with 405")
    accepted(offered_route(exchange))
