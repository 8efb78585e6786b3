"""Key files: what is made, what is read, and what is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.keys import (
    MOST_KEYS,
    CurveConnector,
    CurveListener,
    KeysError,
    NullSecurity,
    PeerRole,
    allowed_keys,
    connector_security,
    listener_security,
    make_keys,
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("scheduler", "frontend", "worker"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"


def test_secrets_are_for_their_owner_alone(keys: Path) -> None:
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in keys.glob("*_secret")} == {
        f"{name}.key_secret": "0o600" for name in ("scheduler", "frontend", "worker")
    }
    assert keys.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in keys.iterdir() if path.name.startswith(".")) == []


def test_both_ends_know_each_other_by_the_files(keys: Path) -> None:
    listener = listener_security(str(keys), PeerRole.WORKER, insecure_sockets=False)
    connector = connector_security(str(keys), PeerRole.WORKER, insecure_sockets=False)
    assert isinstance(listener, CurveListener) and isinstance(connector, CurveConnector)
    assert connector.scheduler == listener.public
    assert connector.public in allowed_keys(keys, PeerRole.WORKER)
    assert connector.public not in allowed_keys(keys, PeerRole.FRONTEND)


def test_secret_keys_are_not_shown(keys: Path) -> None:
    listener = listener_security(str(keys), PeerRole.WORKER, insecure_sockets=False)
    assert isinstance(listener, CurveListener)
    assert listener.secret.decode() not in repr(listener)


def test_without_keys_nothing_is_encrypted() -> None:
    assert listener_security("", PeerRole.WORKER, insecure_sockets=True) == NullSecurity(True)
    assert connector_security("", PeerRole.WORKER, insecure_sockets=False) == NullSecurity(False)


def test_a_key_in_use_is_never_replaced(keys: Path) -> None:
    before = (keys / "worker.key_secret").read_bytes()
    with pytest.raises(KeysError, match="is there already"):
        make_keys(keys, "worker")
    assert (keys / "worker.key_secret").read_bytes() == before


def test_what_cannot_be_used_is_named(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="contradict"):
        connector_security(str(keys), PeerRole.WORKER, insecure_sockets=True)
    with pytest.raises(KeysError, match="headrace keys"):
        connector_security(str(tmp_path / "none"), PeerRole.WORKER, insecure_sockets=False)
    (keys / "worker.key_secret").chmod(0o604)
    with pytest.raises(KeysError, match="open to every user"):
        connector_security(str(keys), PeerRole.WORKER, insecure_sockets=False)
    (keys / "worker.key").write_text("no key")
    with pytest.raises(KeysError, match=r"worker\.key is no key file"):
        allowed_keys(keys, PeerRole.WORKER)


def test_a_public_file_in_the_place_of_a_secret_one_is_refused(keys: Path) -> None:
    (keys / "worker.key_secret").write_bytes((keys / "worker.key").read_bytes())
    with pytest.raises(KeysError, match="holds no secret key"):
        connector_security(str(keys), PeerRole.WORKER, insecure_sockets=False)


def test_the_list_of_keys_is_bounded(tmp_path: Path) -> None:
    public = make_keys(tmp_path, "worker")[0].read_bytes()
    for number in range(MOST_KEYS):
        (tmp_path / f"worker-{number}.key").write_bytes(public)
    with pytest.raises(KeysError, match=f"more than {MOST_KEYS}"):
        allowed_keys(tmp_path, PeerRole.WORKER)
