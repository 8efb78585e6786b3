"""The main of a frontend process."""

from __future__ import annotations

import gc
import logging
import socket
import sys

from frontend.http.app import create_app
from frontend.http.keys import KeyFileError, KeyRing, key_ring
from frontend.http.metrics_server import MetricsServer
from frontend.http.server import FrontendServer, TlsError
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from frontend.text.errors import TemplateError
from headrace.lease import LeaseClient
from headrace.model_files.artefacts import ArtefactError, Artefacts, byte_artefacts, load_artefacts
from protocol.keys import KeysError
from protocol.transport import AddressError, check_address

log = logging.getLogger("headrace.frontend")

BACKLOG = 2048


def run(settings: FrontendSettings) -> int:
    """Serve until told to stop; 0 after a drain, 1, having said why in one line, when serving is impossible."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    process = FrontendProcess(settings)
    try:
        return process.serve()
    finally:
        process.lease.close()


class FrontendProcess:
    """A frontend, its server and its lease, each telling the others what they must know."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._server: FrontendServer | None = None
        self._frontend: Frontend | None = None
        self._lost = False
        self.lease = LeaseClient(
            settings.lease, role="frontend", name=settings.name, on_lost=self._lease_lost, progress=self._turns
        )

    def serve(self) -> int:
        """Load, listen, serve; the exit code."""
        settings = self._settings
        self.lease.report("starting")
        try:
            check_address(settings.scheduler, settings.scheduler_security())
            ring = key_ring(settings.api_key_digests, settings.api_key_file, settings.prefix_share)
            _check_tls(settings)
            listener = _listener(settings)
            frontend = Frontend(
                settings,
                _artefacts(settings),
                on_ready=lambda: self.lease.report("ready"),
                on_refused=self._refused,
            )
            self._frontend = frontend
            self._server = self._made_server(frontend, ring)
        except (AddressError, KeysError, ArtefactError, KeyFileError, TemplateError, TlsError, OSError) as error:
            return self._failed(str(error))
        if self._lost:
            return 0
        gc.collect()
        gc.freeze()
        self._server.run(sockets=[listener])
        return 1 if self._server.fatal else 0

    def _made_server(self, frontend: Frontend, ring: KeyRing | None) -> FrontendServer:
        """Raises TlsError, and OSError when the metrics port is taken."""
        settings = frontend.settings
        metrics = None
        if settings.metrics_port >= 0:
            metrics = MetricsServer(frontend, _listen(settings.metrics_host, settings.metrics_port))
        return FrontendServer(
            create_app(frontend, ring), frontend, metrics=metrics, on_drain=lambda: self.lease.report("draining")
        )

    def _failed(self, reason: str) -> int:
        """Say why, in one line: to the supervisor, or to the person who started this process."""
        self.lease.report("failed", message=reason)
        if not self._settings.lease:
            sys.stderr.write(f"headrace frontend: {' '.join(reason.split())}\n")
        return 1

    def _refused(self, reason: str) -> None:
        """The scheduler will never take this frontend."""
        assert self._server is not None
        self._failed(reason)
        self._server.fatal = True
        self._server.stop()

    def _lease_lost(self) -> None:
        """On the lease's thread: the supervisor is gone, so drain and end."""
        log.warning("the supervisor is gone; draining")
        self._lost = True
        if self._server is not None:
            self._server.stop_from_thread()

    def _turns(self) -> int:
        return self._frontend.turns if self._frontend is not None else 0


def _artefacts(settings: FrontendSettings) -> Artefacts:
    if settings.tokenizer == "byte":
        return byte_artefacts()
    return load_artefacts(settings.model, revision=settings.revision, download_dir=settings.download_dir, weights=False)


def _check_tls(settings: FrontendSettings) -> None:
    """A server that was meant to be encrypted never serves in the clear. Raises TlsError."""
    if (settings.ssl_keyfile or settings.ssl_ca_certs or settings.ssl_cert_reqs) and not settings.ssl_certfile:
        raise TlsError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
    if settings.ssl_cert_reqs and not settings.ssl_ca_certs:
        raise TlsError("--ssl-cert-reqs needs --ssl-ca-certs: whose client certificates are good")


def _listener(settings: FrontendSettings) -> socket.socket:
    """The inherited socket, or a new one. Raises OSError."""
    if settings.fd >= 0:
        return socket.socket(fileno=settings.fd)
    return _listen(settings.host, settings.port)


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError that says where."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
