"""The main of one rank: build the engine, register, serve until told to stop.

The same in a subprocess (options as JSON in the environment) and in a Ray actor. A rank lives while it holds its
lease, whoever started it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import msgspec

from headrace.lease import LeaseClient
from headrace.model_files.artefact_error import ArtefactError
from protocol.keys import KeysError
from protocol.transport import AddressError
from workers.engine import Engine, ModelDoesNotFit
from workers.leader import Ended, Leader
from workers.model.errors import ModelError
from workers.options import WorkerOptions
from workers.script import ScriptError
from workers.threads import limit_threads, threads_for_rank

OPTIONS_VARIABLE = "HEADRACE_WORKER_OPTIONS"
"""Carries the options as JSON to ``headrace worker-rank``."""

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 3
"""The options, the model or the script cannot work: starting this rank again would fail again."""
EXIT_LEASE_LOST = 4

Report = Callable[[str, float], None]
"""(stage, fraction of it that is done)"""


class RankError(RuntimeError):
    """A rank that cannot work as asked; one line for people."""


def rank_name(options: WorkerOptions) -> str:
    """What a rank is called on the lease and in logs."""
    return f"{options.served_model_name}/{options.group}/{options.incarnation}/{options.rank}"


def run(options: WorkerOptions, *, ranks_on_host: int = 1, handle_signals: bool = True) -> int:
    """Run one rank to its end and return its exit status.

    What a person must know goes to the supervisor in one line, or to stderr when there is none. With
    ``handle_signals`` SIGTERM ends the leader after the plans it has received, and Ctrl-C in a terminal, which reaches
    every process there, is left to the launcher.
    """
    if handle_signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = threads_for_rank(options.threads, ranks_on_host)
    limit_threads(threads)
    if ranks_on_host > 1:
        options = msgspec.structs.replace(options, threads=threads)
    return _Rank(options, handle_signals).run()


class _Rank:
    def __init__(self, options: WorkerOptions, handle_signals: bool) -> None:
        self._options = options
        self._handle_signals = handle_signals
        self._leader: Leader | None = None
        self._lease = LeaseClient(
            options.lease,
            role="rank",
            name=rank_name(options),
            on_lost=lambda: os._exit(EXIT_LEASE_LOST),
            progress=lambda: self._leader.progress() if self._leader is not None else 0,
        )

    def run(self) -> int:
        try:
            return self._serve()
        except _UNUSABLE as error:
            return self._failed(str(error), EXIT_UNUSABLE)
        finally:
            self._lease.close()

    def _serve(self) -> int:
        if self._options.tp != 1 or self._options.rank != 0:
            raise RankError(f"tensor parallel groups are not supported yet: tp is {self._options.tp}, use 1")
        self._lease.report("starting", stage="importing")
        engine = _build_engine(self._options, self._loading)
        try:
            leader = self._leader = self._make_leader(engine)
            if self._handle_signals:
                signal.signal(signal.SIGTERM, _Sigterm(leader))
            self._loading("registering", 1.0)
            end = leader.run()
        finally:
            engine.close()
        if end.why is Ended.STOPPED:
            return EXIT_STOPPED
        return self._failed(end.message, EXIT_UNUSABLE if end.why is Ended.REFUSED else EXIT_FAILED)

    def _make_leader(self, engine: Engine) -> Leader:
        backend = engine.description.backend
        try:
            return Leader(self._options, engine, on_registered=lambda: self._lease.report("ready", backend=backend))
        except OSError as error:
            raise RankError(f"cannot write the step log {self._options.step_log}: {error.strerror}") from error

    def _loading(self, stage: str, fraction: float) -> None:
        self._lease.report("loading", stage=stage, fraction=round(fraction, 3))

    def _failed(self, message: str, status: int) -> int:
        line = " ".join(message.split())
        self._lease.report("failed", message=line, unusable=status == EXIT_UNUSABLE)
        if not self._options.lease:
            sys.stderr.write(f"headrace worker {rank_name(self._options)}: {line}\n")
        return status


class _Sigterm:
    """The first drains, the next ends."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._told = False

    def __call__(self, number: int, frame: object) -> None:
        if self._told:
            self._leader.stop("SIGTERM, again")
        else:
            self._told = True
            self._leader.drain("SIGTERM")


_UNUSABLE = (RankError, ArtefactError, ScriptError, AddressError, KeysError, ModelError, ModelDoesNotFit)


def _build_engine(options: WorkerOptions, report: Report) -> Engine:
    """The engine the options name. Of them only a model that torch runs imports torch."""
    if options.engine == "model":
        from workers.model_engine import build_model_engine

        return build_model_engine(options, report)
    report("loading the tokenizer", 0.0)
    if options.engine == "scripted":
        from workers.scripted import build_scripted_engine, load_tokenizer_artefacts

        return build_scripted_engine(options, load_tokenizer_artefacts(options))
    from workers.scripted import load_tokenizer_artefacts
    from workers.simulated import build_simulated_engine

    return build_simulated_engine(options, load_tokenizer_artefacts(options))
