"""Every route by its path: what it takes, who may use it, and under which name it is counted.

The one table behind routing, authentication, 405 answers, metrics labels, /openapi.json and docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from starlette.types import Scope


class Access(Enum):
    """Who may use a route once keys are configured."""

    OPEN = "open"
    KEY = "key"
    METRICS = "metrics"
    """An admin key, or nobody's when metrics are public."""
    ADMIN = "admin"
    """An admin key; the route is not there unless some key is one."""
    DOCS = "docs"
    """As ``--docs`` says."""


@dataclass(frozen=True)
class RouteSpec:
    """One route. ``{…}`` in a path stands for the rest of it."""

    path: str
    method: str
    summary: str
    access: Access = Access.KEY
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)

    @property
    def methods(self) -> tuple[str, ...]:
        """Whatever can be read can be asked for its headers alone."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


def _v1(path: str, method: str, summary: str) -> RouteSpec:
    return RouteSpec(f"/v1{path}", method, summary, aliases=(path,))


ROUTES = (
    _v1("/chat/completions", "POST", "Answer a conversation, whole or streamed"),
    _v1("/chat/completions/render", "POST", "Show the prompt that a conversation becomes"),
    _v1("/completions", "POST", "Continue a prompt, whole or streamed"),
    _v1("/tokenize", "POST", "Token ids of a prompt or a conversation"),
    _v1("/detokenize", "POST", "Text of token ids"),
    _v1("/models", "GET", "What is served, and how it is"),
    _v1("/models/{model_id}", "GET", "One served model"),
    RouteSpec("/livez", "GET", "200 while this process turns", Access.OPEN),
    RouteSpec("/readyz", "GET", "200 when requests are welcome", Access.OPEN, aliases=("/health",)),
    RouteSpec("/metrics", "GET", "Prometheus metrics", Access.METRICS),
    RouteSpec("/debug/requests/{id}", "GET", "Where a request's time went", Access.ADMIN),
    RouteSpec("/version", "GET", "This server's version"),
    RouteSpec("/load", "GET", "How busy this server is"),
    RouteSpec("/openapi.json", "GET", "This API, described", Access.DOCS),
    RouteSpec("/docs", "GET", "The same for people", Access.DOCS),
    RouteSpec("/", "GET", "What this is and how to call it"),
)

NOT_OFFERED = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/files",
    "/v1/batches",
)
"""Known to clients and not built yet; also what lies below them, and the same without /v1."""

OTHER_ROUTE = "other"
"""What metrics call a path that is none of ours."""

BY_PATH: Mapping[str, RouteSpec] = {path: spec for spec in ROUTES for path in spec.paths}
_MODEL = "/v1/models/{model_id}"
_REQUEST = "/debug/requests/{id}"


def route_path(scope: Scope, root_path: str) -> str:
    """The path that is matched: percent-decoded by the server, without the prefix that a proxy may have left on."""
    path: str = scope["path"]
    return path[len(root_path) :] if root_path and path.startswith(f"{root_path}/") else path


def route_of(path: str) -> RouteSpec | None:
    """The route a path belongs to, whatever the method."""
    spec = BY_PATH.get(path)
    if spec is None and path.startswith(("/v1/models/", "/models/")):
        return BY_PATH[_MODEL]
    if spec is None and path.startswith("/debug/requests/"):
        return BY_PATH[_REQUEST]
    return spec


def is_offered_elsewhere(path: str) -> bool:
    """Whether other servers have a route here."""
    full = path if path.startswith("/v1/") else f"/v1{path}"
    return any(full == offered or full.startswith(f"{offered}/") for offered in NOT_OFFERED)
