"""Who may pass: keys are checked here, before any route runs.

Everything needs a key unless the route table says otherwise. What decides is the path that routing matches, never a URL
put together from headers.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.errors import ApiError
from frontend.http.envelope import error_response
from frontend.http.keys import ANYONE, Caller, KeyRing
from frontend.http.route_table import Access, route_of, route_path

TENANT_HEADER = b"x-headrace-tenant"
_STATE = "caller"


def caller_of(scope: Scope) -> Caller:
    """Who sent this request; set for every request that reaches a route."""
    caller: Caller = scope["state"][_STATE]
    return caller


class Guard:
    """Wraps the application. ``ring`` None lets everyone in."""

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing | None,
        *,
        root_path: str = "",
        metrics_public: bool = False,
        docs_public: bool = False,
        on_error: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        self._app = app
        self._ring = ring
        self._root_path = root_path
        self._on_error = on_error
        self._open = {Access.OPEN}
        if metrics_public:
            self._open.add(Access.METRICS)
        if docs_public:
            self._open.add(Access.DOCS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._judge(scope)
        except ApiError as error:
            self._on_error(error)
            await error_response(error)(scope, receive, send)
            return
        await self._app({**scope, "state": {**scope.get("state", {}), _STATE: caller}}, receive, send)

    def _is_for_admins(self, access: Access) -> bool:
        """A route that is there for admins alone does not exist where there are none."""
        if access is Access.ADMIN:
            return self._ring is not None and self._ring.has_admin
        return access is Access.METRICS and access not in self._open

    def _judge(self, scope: Scope) -> Caller:
        """The caller, if this one may pass. Raises ApiError."""
        if self._ring is None:
            return ANYONE
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        spec = route_of(route_path(scope, self._root_path))
        access = Access.KEY if spec is None else spec.access
        key = _presented(headers)
        caller = None if key is None else self._ring.caller(key)
        if caller is None:
            if access in self._open or scope["method"] == "OPTIONS":
                return Caller()
            raise _unauthorised(missing=key is None)
        if not caller.admin and self._is_for_admins(access):
            path = "/metrics" if access is Access.METRICS else "this"
            raise ApiError(403, f"This key does not open {path}; use an admin key.", code="admin_key_required")
        tenant = next((value for name, value in headers if name == TENANT_HEADER), None)
        return caller if tenant is None else self._ring.on_behalf_of(caller, tenant.decode("latin-1"))


def _presented(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key in ``Authorization: Bearer`` or, as some clients send it, in ``x-api-key``."""
    given = dict(reversed(headers))
    scheme, _, key = given.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return given.get(b"x-api-key", b"").strip() or None


def _unauthorised(*, missing: bool) -> ApiError:
    message = "No API key was given; send it as -H 'Authorization: Bearer KEY'." if missing else "Incorrect API key."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
