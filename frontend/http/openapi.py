"""/openapi.json: the routes of ``route_table`` with schemas made from the structs that decode and encode them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.answer import shapes
from frontend.http.debug_routes import RequestReport
from frontend.http.field_docs import REF, Schema, request_schemas
from frontend.http.probes import Alive, LoadReport, ModelCard, ModelList, Ready, VersionInfo
from frontend.http.route_table import ROUTES, Access, RouteSpec
from frontend.http.token_routes import (
    Detokenized,
    DetokenizeRequest,
    RenderedPrompt,
    TokenizeChatRequest,
    Tokenized,
    TokenizeTextRequest,
)
from frontend.request.requests import ChatRequest, CompletionRequest

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html"
METRICS = "text/plain"

STATUSES = {
    400: "The request is not valid; `param` names the field.",
    401: "No key, or a wrong one.",
    403: "The key is right and does not open this route.",
    404: "Unknown model, or request.",
    408: "No more of the body came for 30 s.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue, or the room for large bodies, is full; `Retry-After` says when to come back.",
    500: "The engine cannot serve this request; trying again will not help.",
    503: "Nobody can serve this now; `Retry-After` says when to come back.",
    504: "The request's deadline passed before the first token.",
}
_BODY = (400, 404, 408, 413, 415, 429)
_GENERATION = (*_BODY, 500, 503, 504)


class ErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """Path of the field at fault."""
    code: str | None
    """One of a closed list."""


class Error(msgspec.Struct):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


@dataclass(frozen=True)
class Content:
    """What a route takes and gives."""

    answers: Mapping[str, str]
    """Content type → schema name; an empty name is plain text."""
    requests: tuple[type[msgspec.Struct], ...] = ()
    statuses: Sequence[int] = ()


CONTENTS: Mapping[str, Content] = {
    "/v1/chat/completions": Content(
        {JSON: "ChatCompletion", EVENTS: "ChatCompletionChunk"}, (ChatRequest,), _GENERATION
    ),
    "/v1/chat/completions/render": Content({JSON: "RenderedPrompt"}, (TokenizeChatRequest,), _BODY),
    "/v1/completions": Content({JSON: "Completion", EVENTS: "CompletionChunk"}, (CompletionRequest,), _GENERATION),
    "/v1/tokenize": Content({JSON: "Tokenized"}, (TokenizeChatRequest, TokenizeTextRequest), _BODY),
    "/v1/detokenize": Content({JSON: "Detokenized"}, (DetokenizeRequest,), _BODY),
    "/v1/models": Content({JSON: "ModelList"}),
    "/v1/models/{model_id}": Content({JSON: "ModelCard"}, statuses=(404,)),
    "/livez": Content({JSON: "Alive"}),
    "/readyz": Content({JSON: "Ready"}, statuses=(503,)),
    "/metrics": Content({METRICS: ""}, statuses=(403,)),
    "/debug/requests/{id}": Content({JSON: "RequestReport"}, statuses=(403, 404)),
    "/version": Content({JSON: "VersionInfo"}),
    "/load": Content({JSON: "LoadReport"}),
    "/openapi.json": Content({JSON: "OpenApi"}),
    "/docs": Content({HTML: ""}),
    "/": Content({HTML: ""}),
}

HEADERS: Mapping[str, str] = {
    "x-request-id": "The client's `X-Request-Id`, or one made here.",
    "x-headrace-frontend": "The process that answered.",
}


def document(version: str, root_path: str = "") -> Schema:
    """The whole description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": version,
            "description": "An LLM server that speaks the OpenAI API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "paths": {path: _path_item(spec, path) for spec in ROUTES for path in spec.paths},
        "components": {
            "schemas": _schemas(),
            "headers": {
                name: {"description": text, "required": True, "schema": {"type": "string"}}
                for name, text in HEADERS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path_item(spec: RouteSpec, path: str) -> Schema:
    item: Schema = {method.lower(): _operation(spec, path, method) for method in spec.methods}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return {**item, **({"parameters": parameters} if parameters else {})}


def _operation(spec: RouteSpec, path: str, method: str) -> Schema:
    content = CONTENTS[spec.path]
    statuses = set(content.statuses) | ({401} if spec.access is not Access.OPEN else set())
    head = method == "HEAD"
    operation: Schema = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": spec.summary,
        "responses": {"200": _answer("Done.", {} if head else content.answers)}
        | {str(status): _answer(STATUSES[status], {} if head else {JSON: "Error"}) for status in sorted(statuses)},
    }
    if spec.access is not Access.OPEN:
        operation["security"] = [{"key": []}, {}]
    if path != spec.path:
        operation["description"] = f"The same as `{spec.path}`."
    if content.requests:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _one_of([kind.__name__ for kind in content.requests])}},
        }
    return operation


def _answer(text: str, contents: Mapping[str, str]) -> Schema:
    answer: Schema = {
        "description": text,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS},
    }
    if contents:
        answer["content"] = {kind: {"schema": _schema_of(kind, name)} for kind, name in contents.items()}
    return answer


def _schema_of(kind: str, name: str) -> Schema:
    if kind == EVENTS:
        return {
            "type": "object",
            "description": "One server-sent event; the last one's data is `[DONE]`.",
            "properties": {
                "data": {
                    "anyOf": [
                        {
                            "type": "string",
                            "contentMediaType": JSON,
                            "contentSchema": {"anyOf": [{"$ref": REF.format(name=it)} for it in (name, "Error")]},
                        },
                        {"const": "[DONE]"},
                    ]
                }
            },
            "required": ["data"],
        }
    return {"$ref": REF.format(name=name)} if name else {"type": "string"}


def _one_of(names: list[str]) -> Schema:
    options = [{"$ref": REF.format(name=name)} for name in names]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _schemas() -> dict[str, Schema]:
    answers = [
        _envelope("ChatCompletion", shapes.ChatChoice, "A whole answer of a chat."),
        _envelope("ChatCompletionChunk", shapes.ChunkChoice, "One event of a streamed chat."),
        _envelope("Completion", shapes.TextChoice, "A whole completion."),
        _envelope("CompletionChunk", shapes.TextChoice, "One event of a streamed completion."),
    ]
    plain = [Tokenized, Detokenized, RenderedPrompt, ModelList, ModelCard, Alive, Ready, VersionInfo, LoadReport]
    plain += [RequestReport, Error]
    _, made = msgspec.json.schema_components([*answers, *plain], ref_template=REF)
    for content in CONTENTS.values():
        for kind in content.requests:
            made.update(request_schemas(kind))
    made["OpenApi"] = {"type": "object", "required": ["openapi", "paths"]}
    for schema in made.values():
        schema.pop("title", None)
    return made


def _envelope(name: str, choice: type[msgspec.Struct], text: str) -> type[msgspec.Struct]:
    """The envelope of answers, with the choices it has on one route."""
    made: list[Any] = []
    for field in msgspec.structs.fields(shapes.Envelope):
        kind = list[choice] if field.name == "choices" else field.type  # type: ignore[valid-type]
        made.append((field.name, kind) if field.required else (field.name, kind, field.default))
    return msgspec.defstruct(name, made, namespace={"__doc__": inspect.cleandoc(text)}, kw_only=True)
