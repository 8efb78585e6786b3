"""``headrace keys``: what it makes, and that rotation keeps the old key welcome."""

from __future__ import annotations

from pathlib import Path

from headrace.commands.keys import main
from protocol.keys import CurveConnector, PeerRole, allowed_keys, connector_security


def test_a_folder_gets_the_keys_of_every_role_once(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "keys"
    assert main([str(folder)]) == 0
    made = {f"{role}{end}" for role in ("scheduler", "frontend", "worker") for end in (".key", ".key_secret")}
    assert {path.name for path in folder.iterdir()} == made
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == made
    assert main([str(folder)]) == 1
    assert "has every key" in capsys.readouterr().err


def test_rotation_keeps_the_old_key_on_the_list_until_it_is_deleted(tmp_path: Path, capsys) -> None:
    main([str(tmp_path)])
    old = _public(tmp_path)
    assert main([str(tmp_path), "--rotate", "frontend"]) == 0
    assert _public(tmp_path) != old
    assert allowed_keys(tmp_path, PeerRole.FRONTEND) == {old, _public(tmp_path)}
    assert main([str(tmp_path), "--rotate", "frontend"]) == 1, "the old one may still be in use"
    (tmp_path / "frontend-old.key").unlink()
    assert main([str(tmp_path), "--rotate", "frontend"]) == 0


def test_nothing_is_rotated_where_nothing_is(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path), "--rotate", "worker"]) == 1
    assert "nothing to rotate" in capsys.readouterr().err


def _public(keys: Path) -> bytes:
    security = connector_security(str(keys), PeerRole.FRONTEND, insecure_sockets=False)
    assert isinstance(security, CurveConnector)
    return security.public
