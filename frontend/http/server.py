"""The HTTP server around a frontend: signals, draining, and the order in which things end.

A first SIGTERM or SIGINT drains: no longer ready, new requests refused, answers under way finish within the drain
limit and then end with an error. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from frontend import doctor, errors
from frontend.http.http_protocol import protocol_for
from frontend.http.metrics_server import MetricsServer
from frontend.service import Frontend
from frontend.settings import FrontendSettings

log = logging.getLogger("headrace.frontend")

LAST_WORDS_SECONDS = 2.0
"""For error events to reach their clients once the drain limit is over."""


class TlsError(ValueError):
    """Certificates that cannot be used; one line."""


class FrontendServer(uvicorn.Server):
    """uvicorn with draining in place of its own signal handling."""

    def __init__(
        self,
        app: ASGIApp,
        frontend: Frontend,
        *,
        metrics: MetricsServer | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises TlsError."""
        super().__init__(config_of(app, frontend.settings))
        self._metrics = metrics
        self._serving_metrics: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[None] | None = None
        self.fatal = False
        """What ends this server is an error, not a wish."""
        self._frontend = frontend
        self._on_drain = on_drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Entered by uvicorn around the whole life of the server, inside the event loop."""
        self._loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT)
        for number in caught:
            self._loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in caught:
                self._loop.remove_signal_handler(number)
            self._loop = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if is_first(self._frontend.settings.name):
            self._examining = asyncio.create_task(examine_template(self._frontend))
        if self._metrics is not None:
            self._serving_metrics = asyncio.create_task(self._metrics.run_until_told())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._metrics is not None and self._serving_metrics is not None:
            self._metrics.should_exit = True
            await self._serving_metrics

    def stop(self) -> None:
        """Drain; called again, end at once. In the event loop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.force_exit = True
            self.should_exit = True

    def stop_from_thread(self) -> None:
        """The same as ``stop``, from any thread and at any time."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.stop)

    async def _drain(self) -> None:
        frontend = self._frontend
        frontend.draining = True
        self._on_drain()
        log.info("draining: %d requests under way", frontend.under_way)
        try:
            async with asyncio.timeout(frontend.settings.drain_timeout):
                await frontend.idle.wait()
        except TimeoutError:
            log.warning("drain limit reached: %d requests end with an error", frontend.under_way)
            frontend.client.fail_all(errors.unavailable("This server is shutting down."))
        self.should_exit = True


def is_first(name: str) -> bool:
    """Whether this frontend speaks for those beside it, which have the same template: frontend-0, or one alone."""
    return not re.search(r"-[1-9]\d*$", name)


async def examine_template(frontend: Frontend) -> None:
    """Log what the template doctor finds, as loudly as it is bad; nobody waits for it."""

    def work() -> list[doctor.Finding]:
        return doctor.examine(
            frontend.artefacts, frontend.preparer.template, frontend.settings.default_chat_template_kwargs
        )

    findings = await frontend.preparer.in_pool(work)
    level = logging.WARNING if doctor.worst(findings) >= doctor.Severity.WARNING else logging.INFO
    log.log(level, "the chat template of %s:\n%s", frontend.artefacts.name, doctor.table(findings))


def config_of(app: ASGIApp, settings: FrontendSettings) -> uvicorn.Config:
    """uvicorn's configuration; logging is left as the process set it up. Raises TlsError."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol_for(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(LAST_WORDS_SECONDS),
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        ssl_ca_certs=settings.ssl_ca_certs or None,
        ssl_cert_reqs=settings.ssl_cert_reqs,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"TLS cannot be used: {_tls_files(settings)}: {error}") from error
    return config


def _tls_files(settings: FrontendSettings) -> str:
    return ", ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)))
