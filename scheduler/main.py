"""The scheduler process: bind, serve, drain, end."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from headrace.lease import LeaseClient
from protocol.keys import KeysError
from protocol.transport import AddressError
from scheduler.loop import SchedulerLoop
from scheduler.metrics import metrics_server
from scheduler.settings import SchedulerSettings

logger = logging.getLogger(__name__)

COLLECTIONS = (10_000, 20, 50)
"""Thresholds of the garbage collector. Requests and their choices refer to each other, so it is needed; as it comes, it
takes a tenth of a busy loop's time."""


def run(settings: SchedulerSettings) -> int:
    """Run a scheduler to its end; returns the exit status.

    SIGTERM and SIGINT drain; a second one ends at once. So does the loss of the lease: drain, then exit.
    SIGUSR1 writes the last steps to a file.
    """
    try:
        loop = SchedulerLoop(settings)
    except (AddressError, KeysError) as error:
        return _failed(settings, str(error))
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECTIONS)
    lease = LeaseClient(
        settings.lease, role="scheduler", name=settings.name, on_lost=loop.drain, progress=lambda: loop.turns
    )
    with contextlib.closing(lease), _signals(loop), contextlib.ExitStack() as stack:
        if settings.metrics_port:
            try:
                stack.enter_context(metrics_server(settings.metrics_host, settings.metrics_port, loop.published))
            except OSError as error:
                loop.stop()
                loop.run()  # closes the sockets
                return _failed(settings, f"cannot serve metrics on port {settings.metrics_port}: {error.strerror}")
        lease.report("bound", frontends=loop.frontends.transport.address, workers=loop.workers.transport.address)
        logger.info(
            "scheduler %s: frontends at %s, workers at %s",
            settings.name,
            loop.frontends.transport.address,
            loop.workers.transport.address,
        )
        loop.run()
    return 0


def _failed(settings: SchedulerSettings, message: str) -> int:
    lease = LeaseClient(settings.lease, role="scheduler", name=settings.name, on_lost=lambda: None, progress=lambda: 0)
    lease.report("failed", message=message)
    lease.close()
    if not settings.lease:
        sys.stderr.write(f"headrace scheduler: {message}\n")
    return 1


@contextlib.contextmanager
def _signals(loop: SchedulerLoop) -> Iterator[None]:
    """First signal drains, second stops; the loop's poll is woken by the signal itself."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            loop.stop()
        asked = True
        loop.drain()

    old_fd = signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)
    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, frame: loop.dump_trace())
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
