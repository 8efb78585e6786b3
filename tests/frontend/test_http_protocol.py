"""Below the routes: what is no request, heads that are too large, TLS, and the metrics port."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme

from frontend.http.server import FrontendServer, TlsError
from frontend.main import run
from frontend.service import Frontend
from headrace.model_files.artefacts import Artefacts
from tests.frontend.harness import CHAT, SECONDS, Bench, chat, live_bench, settings_for
from tests.frontend.test_process import running

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"


async def exchange(bench: Bench, *pieces: bytes) -> bytes:
    """Send bytes on a connection of its own, until the server closes it or has said nothing more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    received = b""
    async with asyncio.timeout(SECONDS):
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            received = await reader.read()
    writer.close()
    return received


def error_of(raw: bytes, status: int) -> dict[str, object]:
    """The one error body of a raw response that closes its connection."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} "), raw[:200]
    assert "connection: close" in lines and "content-type: application/json" in lines
    assert any(line.startswith("x-request-id: req-") for line in lines) and "x-headrace-frontend: frontend-7" in lines
    parsed = msgspec.json.decode(body)
    assert list(parsed) == ["error"] and list(parsed["error"]) == ["message", "type", "param", "code"]
    error: dict[str, object] = parsed["error"]
    return error


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nA: b\0c\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_the_one_error_body(live: Bench, junk: bytes) -> None:
    assert error_of(await exchange(live, junk), 400)["code"] == "invalid_http"
    assert (await live.client.get("/livez")).status_code == 200


@pytest.mark.parametrize(
    "pieces",
    [
        (GET + b"X: " + b"x" * 17_000 + b"\r\n\r\n",),
        (GET + b"".join(b"X-%d: y\r\n" % at for at in range(3000)) + b"\r\n",),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
        (GET + b"X: ", *[b"x" * 10_000] * 200),
        (GET, *[b"X: y\r\n" * 100] * 100),
    ],
    ids=["one header", "many headers", "a path", "a header without end", "headers without end"],
)
async def test_a_head_beyond_16_kib_is_refused(live: Bench, pieces: tuple[bytes, ...]) -> None:
    raw = await exchange(live, *pieces)
    # A client that goes on sending may see its connection reset before it reads the answer.
    assert not raw or error_of(raw, 431)["code"] == "headers_too_large"
    assert (await live.client.get("/livez")).status_code == 200


async def test_a_head_within_16_kib_passes(live: Bench) -> None:
    raw = await exchange(live, GET + b"X: " + b"x" * 16_000 + b"\r\nConnection: close\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 200")
    body = msgspec.json.encode(chat("y" * 40_000))
    head = f"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    halves = (head.encode() + body[:30_000], body[30_000:])
    assert (await exchange(live, *halves)).startswith(b"HTTP/1.1 200")


async def test_odd_but_legal_requests_are_answered(live: Bench) -> None:
    close = b"Connection: close\r\n\r\n"
    assert (await exchange(live, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + close)).startswith(b"HTTP/1.1 4")
    absolute = b"GET http://elsewhere/livez HTTP/1.1\r\nHost: x\r\n" + close
    assert (await exchange(live, absolute)).startswith(b"HTTP/1.1 200")
    head = await exchange(live, b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n" + close)
    assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
    assert (await exchange(live, b"GET /livez HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    upgrade = b"GET /livez HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, close\r\n\r\n"
    assert (await exchange(live, upgrade)).startswith(b"HTTP/1.1 200")


async def test_an_idle_connection_ends_after_the_keep_alive(tmp_path: Path, artefacts: Artefacts) -> None:
    async with live_bench(tmp_path, artefacts, keep_alive=0.05) as live:
        assert await exchange(live) == b""
        assert (await exchange(live, GET + b"\r\n")).count(b"HTTP/1.1 200") == 1


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


async def test_tls_is_served_and_client_certificates_are_asked_for(
    tmp_path: Path, artefacts: Artefacts, authority: trustme.CA
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    changes = {"ssl_certfile": str(tmp_path / "server.pem"), "ssl_ca_certs": str(tmp_path / "ca.pem")}
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with_certificate = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with_certificate.load_cert_chain(str(tmp_path / "server.pem"))
    async with live_bench(tmp_path, artefacts, **changes) as live:
        base = f"https://127.0.0.1:{live.port}"
        async with httpx.AsyncClient(base_url=base, verify=trusting) as client:
            assert (await client.post(CHAT, json=chat())).status_code == 200
            assert base in (await client.get("/")).text
        with pytest.raises(httpx.TransportError):
            await live.client.get("/livez")
    async with live_bench(tmp_path, artefacts, **changes, ssl_cert_reqs=2) as live:
        base = f"https://127.0.0.1:{live.port}"
        async with httpx.AsyncClient(base_url=base, verify=trusting) as client:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await client.get("/livez")
        async with httpx.AsyncClient(base_url=base, verify=with_certificate) as client:
            assert (await client.get("/livez")).status_code == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"ssl_certfile": "/no/such.pem"},
        {"ssl_keyfile": "/no/such.pem"},
        {"ssl_certfile": "/no/such.pem", "ssl_cert_reqs": 2},
        {"api_key_file": "/no/such"},
    ],
)
def test_a_server_that_should_be_protected_never_serves_unprotected(
    tmp_path: Path,
    artefacts: Artefacts,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(artefacts.directory.parent.parent))
    assert run(settings_for(tmp_path, port=0, **changes)) == 1
    said = capsys.readouterr().err
    assert said.startswith("headrace frontend: ") and said.count("\n") == 1 and ("/no/such" in said or "ssl" in said)


def test_a_certificate_that_is_none_is_named(tmp_path: Path, artefacts: Artefacts) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    frontend = Frontend(settings_for(tmp_path, ssl_certfile=str(tmp_path / "bad.pem")), artefacts)
    with pytest.raises(TlsError, match=r"bad\.pem"):
        FrontendServer(lambda scope, receive, send: None, frontend)  # type: ignore[arg-type,return-value]
    frontend.preparer.close()


async def test_a_metrics_port_is_open_and_ends_with_its_server(
    tmp_path: Path, artefacts: Artefacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(artefacts.directory.parent.parent))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    keys = tmp_path / "keys"
    keys.write_text("sk-user\n")
    async with running(tmp_path, artefacts, metrics_port=port, api_key_file=str(keys)) as made:
        assert (await made.client.get("/v1/models")).status_code == 401
        key = {"authorization": "Bearer sk-user"}
        assert (await made.client.get("/metrics", headers=key)).status_code == 403
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            scraped = await client.get("/metrics")
            assert scraped.status_code == 200 and "headrace_scheduler_up 1.0" in scraped.text
            assert (await client.get("/v1/models")).json()["error"]["code"] == "route_not_found"
            assert (await client.post("/metrics")).status_code == 405
        made.process.send_signal(signal.SIGTERM)
        assert (await made.ended())[0] == 0
