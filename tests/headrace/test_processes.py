"""Whatever our descendants do, they can be found and ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DAEMON = """
import os, signal, sys
if os.fork():
    os._exit(0)          # the middle process leaves its child an orphan
os.setsid()
sys.stdout.write(f"{os.getpid()}\\n"); sys.stdout.close()
signal.pause()
"""

OWNER = """
import os, subprocess, sys
from headrace.supervision.processes import become_subreaper, descendants, end_descendants
become_subreaper()
daemon = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
orphan = int(daemon.stdout.readline())
daemon.wait()
assert orphan in descendants(os.getpid()), (orphan, descendants(os.getpid()))
end_descendants()
assert not descendants(os.getpid())
print(orphan)
"""


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNER, DAEMON], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    orphan = int(done.stdout)
    assert not Path(f"/proc/{orphan}").exists()


def test_orphans_are_collected_and_other_children_are_left_to_their_waiters() -> None:
    code = """
import os, signal, subprocess, sys
from headrace.supervision.processes import reap_orphans
waited = subprocess.Popen([sys.executable, "-c", "pass"])
os.waitid(os.P_PID, waited.pid, os.WEXITED | os.WNOWAIT)
assert reap_orphans({waited.pid}) == []
assert waited.wait() == 0
other = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], os.environ)
os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
assert reap_orphans(set()) == [other]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
