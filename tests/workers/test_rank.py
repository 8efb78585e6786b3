"""A rank says in one line what cannot work, and imports no more than its engine needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.workers.launching import HeldLease
from workers import rank
from workers.options import WorkerOptions
from workers.threads import threads_for_rank, usable_cpus

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sets the variable for its whole process; here that is the test's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def options(**changes: object) -> WorkerOptions:
    fields = {
        "model": "/no/such/model",
        "served_model_name": "m",
        "group": "g0",
        "incarnation": 5,
        "scheduler": "ipc:///nowhere",
        "engine": "scripted",
        "tokenizer": "byte",
    }
    return WorkerOptions(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tp": 2}, "tensor parallel groups are not supported yet: tp is 2, use 1"),
        ({"tokenizer": "model"}, "/no/such/model"),
        ({"engine": "model"}, "/no/such/model"),
        ({"engine_script": "/no/such/script"}, "cannot read the engine script /no/such/script"),
        ({"engine": "simulated", "engine_script": "/no/such/times"}, "cannot read the step times /no/such/times"),
        ({"step_log": "/no/such/directory/log"}, "cannot write the step log /no/such/directory/log"),
        ({"scheduler": "tcp://192.0.2.1:5571"}, "--insecure-sockets"),
    ],
    ids=["tp", "tokenizer", "model", "script", "times", "step log", "address"],
)
def test_what_cannot_work_is_one_line_and_an_exit_status_of_its_own(changes, complaint, capfd) -> None:
    assert rank.run(options(**changes), handle_signals=False) == rank.EXIT_UNUSABLE
    written = capfd.readouterr().err
    assert written.startswith("headrace worker m/g0/5/0: ") and written.count("\n") == 1
    assert complaint in written


def test_with_a_supervisor_the_line_goes_there(tmp_path: Path, capfd) -> None:
    lease = HeldLease(tmp_path / "lease")
    status = rank.run(options(engine_script="/no/such/script", lease=lease.path), handle_signals=False)
    assert status == rank.EXIT_UNUSABLE and capfd.readouterr().err == ""
    assert lease.next_of("rank", state="starting").line["stage"] == "importing"
    failed = lease.next_of("rank", state="failed").line
    assert "/no/such/script" in failed["message"] and failed["unusable"] is True
    lease.close()


def test_a_rank_that_is_nobodys_ends_itself(capfd) -> None:
    assert rank.run(options(orphan_ttl=0.0), handle_signals=False) == rank.EXIT_FAILED
    assert "no session with a scheduler" in capfd.readouterr().err


@pytest.mark.parametrize("engine", ["scripted", "simulated"])
def test_engines_without_a_model_import_no_torch(engine) -> None:
    code = (
        "import sys, msgspec\n"
        "from workers import rank\n"
        "from workers.options import WorkerOptions\n"
        "status = rank.run(msgspec.json.decode(sys.argv[1], type=WorkerOptions))\n"
        "print(status, sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))\n"
    )
    encoded = msgspec.json.encode(options(engine=engine, orphan_ttl=0.0)).decode()
    finished = subprocess.run([sys.executable, "-c", code, encoded], capture_output=True, text=True, timeout=60)
    assert finished.stdout == f"{rank.EXIT_FAILED} []\n", finished.stderr


def test_ranks_share_the_cores_they_may_use(tmp_path: Path) -> None:
    unlimited, quarter, odd = tmp_path / "max", tmp_path / "quota", tmp_path / "odd"
    unlimited.write_text("max 100000\n")
    quarter.write_text("25000 100000\n")
    odd.write_text("nonsense\n")
    cores = usable_cpus(tmp_path / "absent")
    assert usable_cpus(unlimited) == usable_cpus(odd) == cores
    assert usable_cpus(quarter) == 1
    assert threads_for_rank(7, 2) == 7
    assert threads_for_rank(0, 10_000) == 1
    assert threads_for_rank(0, 1) >= threads_for_rank(0, 2)
