"""API keys: where they come from, whose they are, and what their owners may do.

A key file has one key a line, either the bare key or a JSON object; empty lines and lines that begin with ``#`` count
for nothing:

    sk-live-1f0c…
    {"key": "sk-team-a-…", "name": "team-a", "priority_floor": 0}
    {"sha256": "9f86d0…", "name": "ops", "admin": true}
    {"sha256": "2c26b4…", "name": "edge", "gateway": true}

``sha256`` is the hex digest of the key, for files that should hold no secret (``printf %s KEY | sha256sum``).
``tenant`` groups several keys, and is the name unless given. An admin key also opens /metrics and /debug. A gateway's
``x-headrace-tenant`` header says on whose behalf it asks. No request runs earlier than its key's ``priority_floor``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

Meta = msgspec.Meta
PrefixShare = Literal["key", "tenant", "all"]

MAX_TENANT = 256
_TENANT = re.compile(rf"[\x21-\x7e](?:[\x20-\x7e]{{0,{MAX_TENANT - 2}}}[\x21-\x7e])?")
_SALT_PURPOSE = b"headrace-prefix"


class KeyFileError(ValueError):
    """A key file that cannot be used; one line, which never shows a key."""


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request, as its key tells."""

    tenant: str = ""
    """For fairness on the scheduler; empty without keys."""
    salt: bytes = b""
    """What separates this caller's cached prefixes from others'."""
    priority_floor: int = -100
    admin: bool = False
    gateway: bool = False

    def priority_of(self, asked: int | None) -> int:
        """The priority a request runs at: what it asks for, and not before its key's floor."""
        return max(asked or 0, self.priority_floor)


ANYONE = Caller(admin=True)
"""The caller of a server without keys."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a key file."""

    key: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    name: Annotated[str, Meta(max_length=MAX_TENANT)] = ""
    tenant: Annotated[str, Meta(max_length=MAX_TENANT)] = ""
    priority_floor: Annotated[int, Meta(ge=-100, le=100)] = -100
    admin: bool = False
    gateway: bool = False

    def digest(self) -> bytes:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return digest_of(self.key.encode()) if self.key is not None else bytes.fromhex(self.sha256 or "")


class KeyRing:
    """All keys of a server. Holds digests only."""

    def __init__(self, callers: dict[bytes, Caller], share: PrefixShare) -> None:
        """``callers`` by the SHA-256 of their keys."""
        self._callers = {digest: _salted(caller, digest, share) for digest, caller in callers.items()}
        self._share: PrefixShare = share

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def has_admin(self) -> bool:
        """Whether some key is an admin's."""
        return any(caller.admin for caller in self._callers.values())

    def caller(self, key: bytes) -> Caller | None:
        """Whose key this is. Takes as long for a wrong key as for a right one."""
        given = digest_of(key)
        found: Caller | None = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        return found

    def on_behalf_of(self, caller: Caller, tenant: str) -> Caller:
        """The caller when a gateway names one of its tenants; anyone else's word for it changes nothing."""
        if not caller.gateway or not _TENANT.fullmatch(tenant):
            return caller
        salt = b"" if self._share == "all" else _salt(caller.salt + tenant.encode())
        return replace(caller, tenant=tenant, salt=salt)


def key_ring(digests: Iterable[str], file: str, share: PrefixShare) -> KeyRing | None:
    """The keys of a server; None when it has none and is open. Raises KeyFileError."""
    callers: dict[bytes, Caller] = {}
    for digest in digests:
        callers[bytes.fromhex(digest)] = Caller(tenant=f"key-{digest[:12]}")
    if file:
        callers.update(read_keys(Path(file)))
    return KeyRing(callers, share) if callers else None


def read_keys(path: Path) -> dict[bytes, Caller]:
    """Callers by digest. Raises KeyFileError, also for a file without keys: a server must not fall open."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"--api-key-file {path}: cannot be read: {_reason(error)}") from None
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            digest, caller = _read_line(line)
        except ValueError as error:
            raise KeyFileError(f"--api-key-file {path}: line {number}: {error}") from None
        if digest in callers:
            raise KeyFileError(f"--api-key-file {path}: line {number}: the same key as before")
        callers[digest] = caller
    if not callers:
        raise KeyFileError(f"--api-key-file {path}: holds no key")
    return callers


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def _read_line(line: str) -> tuple[bytes, Caller]:
    if not line.startswith("{"):
        if any(character.isspace() for character in line):
            raise ValueError("a key has no spaces")
        entry = KeyEntry(key=line)
    else:
        try:
            entry = msgspec.json.decode(line, type=KeyEntry)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        except msgspec.DecodeError:
            raise ValueError("not a JSON object") from None
    digest = entry.digest()
    tenant = entry.tenant or entry.name or f"key-{digest.hex()[:12]}"
    return digest, Caller(tenant=tenant, priority_floor=entry.priority_floor, admin=entry.admin, gateway=entry.gateway)


def _salted(caller: Caller, digest: bytes, share: PrefixShare) -> Caller:
    if share == "all":
        return caller
    return replace(caller, salt=_salt(digest if share == "key" else caller.tenant.encode()))


def _salt(secret: bytes) -> bytes:
    """The same in every frontend and after every restart, and no help towards the key."""
    return hashlib.blake2b(secret, digest_size=16, person=_SALT_PURPOSE).digest()


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
