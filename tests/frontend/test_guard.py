"""With keys, everything asks for one except what a probe needs; what decides is the path that is routed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.http.app import create_app
from frontend.http.guard import Guard, caller_of
from frontend.http.keys import ANYONE, Caller, KeyRing, digest_of
from frontend.http.route_table import ROUTES, Access
from headrace.model_files.artefacts import Artefacts
from protocol.frontend import Submit
from tests.frontend.harness import CHAT, Bench, bench, chat

USER = {"authorization": "Bearer sk-user"}
ADMIN = {"authorization": "bearer sk-admin"}
RING = KeyRing({digest_of(b"sk-user"): Caller("user"), digest_of(b"sk-admin"): Caller("boss", admin=True)}, "key")
OPEN = {"/livez", "/readyz", "/health"}


def client_of(made: Bench, **options: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(made.frontend, RING), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://bench", **options)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def locked(here: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(here) as client:
        yield client


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"] and response.headers["x-headrace-frontend"]
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)


async def test_every_route_needs_a_key_except_the_probes(locked: httpx.AsyncClient) -> None:
    paths = [path for spec in ROUTES for path in spec.paths] + ["/nowhere", "/v1/embeddings", "//livez", "/livez/"]
    for path in paths:
        for method in ("GET", "POST", "HEAD", "DELETE"):
            response = await locked.request(method, path.replace("{model_id}", "llama-8b"), json={})
            if path in OPEN:
                assert response.status_code in (200, 405)
            elif method == "HEAD":
                assert response.status_code == 401
            else:
                check_refused(response)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-nobody"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": "sk-user"},
        {"authorization": "Basic sk-user"},
        {"authorization": "Bearer sk-user-and-more"},
        {"x-api-key": "sk-nobody"},
        {"authorization": "Bearer " + "x" * 5000},
    ],
)
async def test_a_wrong_key_is_no_key(locked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    check_refused(await locked.post(CHAT, json=chat(), headers=headers))


@pytest.mark.parametrize("headers", [USER, {"authorization": "bearer   sk-user"}, {"x-api-key": "sk-user"}])
async def test_a_right_key_passes(locked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await locked.post(CHAT, json=chat(), headers=headers)).status_code == 200
    assert (await locked.get("/v1/models", headers=headers)).status_code == 200
    assert (await locked.get("/nowhere", headers=headers)).status_code == 404


@pytest.mark.parametrize("host", ["x?", "a/livez?", "livez", "x#", "@livez", "h\\x", "[::1]/livez?"])
async def test_a_host_header_opens_nothing(locked: httpx.AsyncClient, host: str) -> None:
    for path in ("/v1/models", "/metrics", "/load"):
        check_refused(await locked.get(path, headers={"host": host}))


async def test_metrics_need_an_admin_or_to_be_public(here: Bench, locked: httpx.AsyncClient, tmp_path: Path) -> None:
    check_refused(await locked.get("/metrics"))
    assert (await locked.get("/metrics", headers=USER)).status_code == 403
    assert (await locked.get("/metrics", headers=ADMIN)).status_code == 200


async def test_public_metrics_and_docs_are_public_and_docs_can_be_off(tmp_path: Path, artefacts: Artefacts) -> None:
    async with bench(tmp_path, artefacts, metrics_public=True, docs="public") as made, client_of(made) as client:
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        check_refused(await client.get("/v1/models"))
    async with bench(tmp_path, artefacts, docs="off") as made, client_of(made, headers=USER) as client:
        for path in ("/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 404


async def test_a_preflight_needs_no_key(tmp_path: Path, artefacts: Artefacts) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    async with bench(tmp_path, artefacts, cors_origins=("https://app.example",)) as made, client_of(made) as client:
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = await client.post(CHAT, json=chat(), headers={**USER, "origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await client.post(CHAT, json=chat(), headers={"origin": "https://app.example"})
        check_refused(refused)
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        elsewhere = await client.options(CHAT, headers={**asked, "origin": "https://evil.example"})
        assert elsewhere.status_code == 403 and "error" in elsewhere.json()
        assert "access-control-allow-origin" not in elsewhere.headers


async def test_without_cors_no_origin_is_named(here: Bench) -> None:
    response = await here.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_options_tells_what_a_route_takes(here: Bench) -> None:
    response = await here.client.options(CHAT)
    assert response.status_code == 204 and response.headers["allow"] == "POST, OPTIONS" and not response.content
    assert (await here.client.options("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await here.client.options("/nowhere")).status_code == 404


async def test_whatever_can_be_read_has_a_head(here: Bench) -> None:
    for spec in ROUTES:
        if spec.method == "GET" and spec.access is not Access.ADMIN:  # without keys that one is not there
            for path in spec.paths:
                assert (await here.client.head(path.replace("{model_id}", "llama-8b"))).status_code == 200, path


paths = st.text(st.sampled_from("/lvizehat.%?#;v1adm\n\\ \0"), max_size=12).map(lambda text: f"/{text}")


@settings(max_examples=300, deadline=None)
@given(paths | st.sampled_from([f"{path}{tail}" for path in OPEN for tail in ("", "/", "\n", "?", "//", "x")]),
       st.sampled_from(["", "/api"]), st.booleans())  # fmt: skip
def test_no_path_but_a_probes_passes_without_a_key(path: str, root: str, prefixed: bool) -> None:
    reached: list[Caller] = []

    async def inner(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        reached.append(caller_of(scope))

    async def send(message: object) -> None:
        pass

    full = f"{root}{path}" if prefixed else path
    scope = {"type": "http", "method": "GET", "path": full, "headers": [], "query_string": b""}
    step = Guard(inner, RING, root_path=root)(scope, None, send)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        step.send(None)
    assert bool(reached) is (path in OPEN)
    reached.clear()
    step = Guard(inner, None)(scope, None, send)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        step.send(None)
    assert reached == [ANYONE]


def test_each_route_says_who_may_use_it() -> None:
    assert {path for spec in ROUTES for path in spec.paths if spec.access is Access.OPEN} == OPEN


async def test_what_a_key_says_reaches_the_scheduler(here: Bench) -> None:
    callers = {
        digest_of(b"sk-team"): Caller("team", priority_floor=-5),
        digest_of(b"sk-edge"): Caller("edge", gateway=True),
    }
    transport = httpx.ASGITransport(create_app(here.frontend, KeyRing(callers, "key")), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:

        async def submitted(key: str, body: dict[str, object], **headers: str) -> Submit:
            answer = await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}", **headers})
            assert answer.status_code == 200, answer.text
            return here.scheduler.submits[-1]

        urgent = await submitted("sk-team", chat(priority=-50))
        assert (urgent.tenant, urgent.priority) == ("team", -5) and urgent.salt
        patient = await submitted("sk-team", chat(priority=7), **{"x-headrace-tenant": "other"})
        assert (patient.tenant, patient.priority, patient.salt) == ("team", 7, urgent.salt)
        salted = await submitted("sk-team", chat(cache_salt="mine"))
        assert salted.salt not in (b"", urgent.salt)
        blue, green = [await submitted("sk-edge", chat(), **{"x-headrace-tenant": name}) for name in ("blue", "green")]
        assert (blue.tenant, green.tenant) == ("blue", "green")
        assert len({urgent.salt, salted.salt, blue.salt, green.salt}) == 4
