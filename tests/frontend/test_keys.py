"""Keys are found by their digest alone, and a file that cannot be used never leaves a server open."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.http.keys import KeyFileError, digest_of, key_ring, read_keys


def ring_of(tmp_path: Path, text: str, share: str = "key"):  # type: ignore[no-untyped-def]
    file = tmp_path / "keys"
    file.write_text(text)
    ring = key_ring((), str(file), share)  # type: ignore[arg-type]
    assert ring is not None
    return ring


LINES = f"""
# people
plain-key
{{"key": "sk-a", "name": "team-a", "priority_floor": -5}}
{{"sha256": "{digest_of(b"sk-ops").hex()}", "name": "ops", "admin": true}}
{{"key": "sk-edge", "name": "edge", "gateway": true}}
{{"key": "sk-a2", "name": "a-second", "tenant": "team-a"}}
"""


def test_a_key_is_found_bare_as_an_object_and_by_digest(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, LINES)
    assert len(ring) == 5
    assert ring.caller(b"plain-key").tenant.startswith("key-")
    assert (ring.caller(b"sk-a").tenant, ring.caller(b"sk-a").priority_floor) == ("team-a", -5)
    assert ring.caller(b"sk-ops").admin and not ring.caller(b"sk-a").admin
    for wrong in (b"", b"sk-", b"sk-A", b"plain-key ", digest_of(b"sk-ops").hex().encode(), b"\xff" * 5000):
        assert ring.caller(wrong) is None


def test_prefixes_are_shared_as_far_as_said(tmp_path: Path) -> None:
    for share, same_tenant, others in (("key", False, False), ("tenant", True, False), ("all", True, True)):
        ring = ring_of(tmp_path, LINES, share)
        salts = {key: ring.caller(key.encode()).salt for key in ("sk-a", "sk-a2", "sk-ops")}
        assert (salts["sk-a"] == salts["sk-a2"]) is same_tenant
        assert (salts["sk-a"] == salts["sk-ops"]) is others
        again = ring_of(tmp_path, LINES, share)
        assert again.caller(b"sk-a").salt == salts["sk-a"]


def test_only_a_gateway_speaks_for_tenants(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, LINES)
    edge, team = ring.caller(b"sk-edge"), ring.caller(b"sk-a")
    blue, green = (ring.on_behalf_of(edge, name) for name in ("blue", "green"))
    assert (blue.tenant, green.tenant) == ("blue", "green")
    assert len({edge.salt, blue.salt, green.salt}) == 3
    assert ring.on_behalf_of(team, "blue") == team
    for odd in ("", " x", "a\nb", "x" * 257, "é"):
        assert ring.on_behalf_of(edge, odd) == edge


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no key"),
        ("# only words\n\n", "no key"),
        ("two words", "line 1"),
        ('{"key": "secret-a"}\n{"key": 7}', "line 2"),
        ('{"name": "secret-nobody"}', "either key or sha256"),
        ('{"key": "secret-a", "sha256": "' + "0" * 64 + '"}', "either key or sha256"),
        ('{"sha256": "abc"}', "line 1"),
        ('{"key": "secret-a", "adminn": true}', "adminn"),
        ('{"key": "secret-a", "priority_floor": 101}', "priority_floor"),
        ('{"key": "secret-a"', "not a JSON object"),
        ("secret-a\nsecret-a", "the same key"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_without_a_key(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError) as raised:
        read_keys(file)
    assert complaint in str(raised.value) and "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_is_an_error_and_no_keys_is_open(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        key_ring((), str(tmp_path / "nothing"), "key")
    assert key_ring((), "", "key") is None
