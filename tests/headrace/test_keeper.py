"""A kept child is started again after every end that was not asked for, and ends when asked, one way or the other."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from headrace.supervision.keeper import Backoff, Keeper, Launch, child_environment

FOREVER = "import signal; print(flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"


class Kept:
    """A keeper of a one-line Python program, and what it was told."""

    def __init__(self, program: str, **launch: Any) -> None:
        self.ends: asyncio.Queue[int] = asyncio.Queue()
        self.launches = 0
        self._launch = Launch((sys.executable, "-c", program), {"some": "settings"}, **launch)
        self.keeper = Keeper("child", self.prepare, lambda keeper, status: self.ends.put_nowait(status), {**os.environ})

    async def prepare(self) -> Launch:
        self.launches += 1
        return self._launch

    async def pid(self, other_than: int | None = None) -> int:
        """The pid of a running child."""
        while (pid := self.keeper.pid) is None or pid == other_than:
            await asyncio.sleep(0.001)
        return pid


@asynccontextmanager
async def kept(program: str, **launch: Any):  # type: ignore[no-untyped-def]
    child = Kept(program, **launch)
    running = asyncio.create_task(child.keeper.run())
    yield child
    await child.keeper.stop(0.0)
    await running


async def test_a_killed_child_is_started_again() -> None:
    async with kept(FOREVER) as child:
        first = await child.pid()
        child.keeper.kill()
        assert await child.ends.get() == -9
        assert await child.pid(other_than=first) != first
        assert child.launches == 2


async def test_a_child_that_ends_by_itself_is_started_again_later_and_later() -> None:
    async with kept("raise SystemExit(7)") as child:
        for _ in range(3):
            assert await child.ends.get() == 7
        assert child.keeper.backoff.failures >= 3


async def test_stopping_is_gentle_first() -> None:
    reader, writer = os.pipe()
    program = (
        "import os, signal, sys\n"
        f"signal.signal(signal.SIGTERM, lambda *_: os.write({writer}, b'asked') and sys.exit(0))\n"
        f"os.write({writer}, b'ready ')\n"
        "while True: signal.pause()"
    )
    async with kept(program, fds=(writer,)) as child:
        pid = await child.pid()
        assert await asyncio.to_thread(os.read, reader, 6) == b"ready "
        await child.keeper.stop(30.0)
        assert os.read(reader, 5) == b"asked"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert child.ends.empty()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    async with kept(STUBBORN) as child:
        pid = await child.pid()
        await child.keeper.stop(0.05)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_stopping_interrupts_the_wait_before_the_next_start() -> None:
    async with kept("raise SystemExit(7)") as child:
        child.keeper.backoff = Backoff(first=3600.0, most=3600.0)
        await child.ends.get()
        await child.ends.get()
        await asyncio.wait_for(child.keeper.stop(0.0), 30)


async def test_stopping_interrupts_a_preparation_that_never_ends() -> None:
    async def prepare() -> Launch:
        await asyncio.Event().wait()
        raise AssertionError

    keeper = Keeper("child", prepare, lambda keeper, status: None, {})
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    await keeper.stop(0.0)
    await asyncio.wait_for(running, 30)
    assert keeper.pid is None


async def test_a_child_gets_its_settings_and_descriptors() -> None:
    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, os.environ['HEADRACE_SETTINGS'].encode()); os.abort()"
    async with kept(program, fds=(writer,)) as child:
        await child.ends.get()
        os.close(writer)
    assert os.read(reader, 1000).startswith(b'{"some":"settings"}')
    os.close(reader)


async def test_a_child_is_in_no_terminals_foreground_group() -> None:
    async with kept(FOREVER) as child:
        pid = await child.pid()
        with suppress(ProcessLookupError):
            assert os.getpgid(pid) == pid


def test_a_long_life_is_followed_by_a_start_at_once() -> None:
    backoff = Backoff(first=0.1, most=1.0, long_life=30.0)
    assert [backoff.after(1.0) for _ in range(7)] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff.after(31.0) == 0.0
    assert backoff.failures == 1


def test_flags_in_the_environment_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1")
    monkeypatch.setenv("HEADRACE_CACHE", "/cache")
    environment = child_environment(frozenset({"HEADRACE_PORT"}))
    assert "HEADRACE_PORT" not in environment
    assert environment["HEADRACE_CACHE"] == "/cache"
