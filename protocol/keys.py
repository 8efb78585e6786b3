"""Key files, and what they make of a socket: who may connect to which door of the scheduler.

A key authorises a role. A folder holds pairs in ZMQ's certificate format; each process gets only the files it needs::

    scheduler.key        public    everyone: whom to expect at the other end
    scheduler.key_secret secret    the scheduler
    frontend*.key        public    the scheduler: who may come in as a frontend
    frontend.key_secret  secret    frontends
    worker*.key          public    the scheduler: who may come in as a leader or launcher
    worker.key_secret    secret    leaders and launchers
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from zmq.auth import create_certificates, load_certificate

SCHEDULER = "scheduler"
PUBLIC, SECRET = ".key", ".key_secret"
MOST_KEYS = 1024
"""Public keys of one role that are read; more is a mistake."""


class KeysError(ValueError):
    """A key file that is missing, unreadable or open to everyone; names it and says what to do."""


class PeerRole(Enum):
    """Who a key may come in as."""

    FRONTEND = "frontend"
    WORKER = "worker"


@dataclass(frozen=True)
class NullSecurity:
    """No encryption: for ipc and loopback, and elsewhere only when the operator insists."""

    insecure_sockets: bool = False


@dataclass(frozen=True)
class CurveListener:
    """The scheduler's end of an encrypted socket; who may come in is asked of the context's gatekeeper."""

    public: bytes
    secret: bytes = field(repr=False)
    role: PeerRole


@dataclass(frozen=True)
class CurveConnector:
    """A peer's end: its own pair, and the key that the scheduler must prove to have."""

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes


ListenerSecurity = NullSecurity | CurveListener
ConnectorSecurity = NullSecurity | CurveConnector


def listener_security(keys: str, role: PeerRole, *, insecure_sockets: bool) -> ListenerSecurity:
    """How the scheduler's socket for ``role`` is secured; ``keys`` is a folder or empty. Raises KeysError."""
    if not _given(keys, insecure_sockets):
        return NullSecurity(insecure_sockets)
    public, secret = _pair(Path(keys), SCHEDULER)
    return CurveListener(public, secret, role)


def connector_security(keys: str, role: PeerRole, *, insecure_sockets: bool) -> ConnectorSecurity:
    """How a peer of ``role`` connects to the scheduler; ``keys`` is a folder or empty. Raises KeysError."""
    if not _given(keys, insecure_sockets):
        return NullSecurity(insecure_sockets)
    public, secret = _pair(Path(keys), role.value)
    return CurveConnector(public, secret, _load(Path(keys) / f"{SCHEDULER}{PUBLIC}")[0])


def allowed_keys(keys: Path, role: PeerRole) -> frozenset[bytes]:
    """Public keys that may come in as ``role``, as they lie in the folder now. Raises KeysError."""
    files = sorted(keys.glob(f"{role.value}*{PUBLIC}"))
    if len(files) > MOST_KEYS:
        raise KeysError(f"{keys} has more than {MOST_KEYS} keys of role {role.value}")
    return frozenset(_load(file)[0] for file in files)


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a pair; returns its public and its secret file. Raises KeysError when either is there already."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = directory / f"{name}{PUBLIC}", directory / f"{name}{SECRET}"
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as making:
        made_public, made_secret = map(Path, create_certificates(making, name))
        made_public.chmod(0o644)
        made_secret.chmod(0o600)
        try:
            # Links, unlike renames, never replace a key that is in use.
            os.link(made_secret, secret)
            os.link(made_public, public)
        except FileExistsError as error:
            raise KeysError(f"{error.filename2} is there already and is kept") from error
    return public, secret


def _given(keys: str, insecure_sockets: bool) -> bool:
    if keys and insecure_sockets:
        raise KeysError("--keys and --insecure-sockets contradict each other; give one of them")
    return bool(keys)


def _pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    path = directory / f"{name}{SECRET}"
    public, secret = _load(path)
    if secret is None:
        raise KeysError(f"{path} holds no secret key")
    if stat.S_IMODE(path.stat().st_mode) & 0o007:
        raise KeysError(f"{path} is open to every user of this host; take that away with chmod o-rwx")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    if not path.is_file():
        raise KeysError(f"{path} does not exist; `headrace keys {path.parent}` makes keys")
    try:
        return load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysError(f"{path} is no key file: {error}") from error
