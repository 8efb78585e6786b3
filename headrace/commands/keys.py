"""``headrace keys DIR``: the keys that encrypt sockets between hosts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from protocol.keys import PUBLIC, SCHEDULER, SECRET, KeysError, PeerRole, make_keys

DESCRIPTION = "Make the keys that encrypt and authenticate tcp:// sockets between hosts."
EPILOG = """\
A process is given a folder by --keys. It needs of these files:
  scheduler   scheduler.key_secret, and every frontend*.key and worker*.key: its list of who may come in
  frontends   frontend.key_secret and scheduler.key
  workers     worker.key_secret and scheduler.key, also on every host of a Ray cluster

To rotate a role's key while serving: headrace keys DIR --rotate frontend; give the scheduler both public files (it
notices within a second); give the new secret to the frontends and restart them one by one; delete the old public file.
"""

NAMES = (SCHEDULER, *(role.value for role in PeerRole))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "headrace keys", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the keys; made when it is not there")
    parser.add_argument("--rotate", choices=NAMES, help="a new key for this role; the old public one stays allowed")
    given = parser.parse_args(arguments)
    try:
        made = _rotate(given.directory, given.rotate) if given.rotate else _complete(given.directory)
    except (KeysError, OSError) as error:
        sys.stderr.write(f"headrace keys: {error}\n")
        return 1
    for path in made:
        sys.stdout.write(f"{path}\n")
    return 0


def _complete(directory: Path) -> list[Path]:
    """Make the pairs that are not there."""
    made: list[Path] = []
    for name in NAMES:
        if not (directory / f"{name}{PUBLIC}").exists() and not (directory / f"{name}{SECRET}").exists():
            made += make_keys(directory, name)
    if not made:
        raise KeysError(f"{directory} has every key; --rotate makes a new one")
    return made


def _rotate(directory: Path, name: str) -> list[Path]:
    """Set the old public key aside, under a name that stays on the list, and make a new pair."""
    public, secret = directory / f"{name}{PUBLIC}", directory / f"{name}{SECRET}"
    if not public.is_file():
        raise KeysError(f"{public} does not exist; there is nothing to rotate")
    kept = directory / f"{name}-old{PUBLIC}"
    if kept.exists():
        raise KeysError(f"{kept} is from an earlier rotation; delete it first, when no process uses that key any more")
    public.rename(kept)
    secret.unlink(missing_ok=True)
    if name == SCHEDULER:
        kept.unlink()  # nobody chooses between two schedulers' keys
    return list(make_keys(directory, name))
