"""A TCP proxy between a scheduler and its peers that can be told to behave like a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from enum import Enum


class Weather(Enum):
    """What happens to bytes on their way."""

    FINE = "fine"
    PARTITION = "partition"
    """Nothing passes, either way; connections stay open and new ones are accepted, as by a router that drops."""
    DEAF = "one-way: nothing reaches the scheduler"
    MUTE = "one-way: nothing leaves the scheduler"
    SLOW = "delay"
    CUT = "cut"
    """Every connection is reset after another so many bytes."""


class Proxy:
    """Forwards ``port`` to ``target``; one event loop on a thread of its own."""

    def __init__(self, target: int, *, delay: float = 0.2, cut_after: int = 2000) -> None:
        self._target = target
        self._delay = delay
        self._cut_after = cut_after
        self._weather = Weather.FINE
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End every connection and the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @contextlib.contextmanager
    def weather(self, weather: Weather) -> Iterator[None]:
        """Bad for as long as one is inside."""
        self._turn(weather)
        try:
            yield
        finally:
            self._turn(Weather.FINE)

    def _turn(self, weather: Weather) -> None:
        def turn() -> None:
            self._weather = weather
            self._changed.set()
            self._changed = asyncio.Event()

        self._loop.call_soon_threadsafe(turn)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        towards = asyncio.create_task(self._forward(reader, back, Weather.DEAF))
        returning = asyncio.create_task(self._forward(there, writer, Weather.MUTE))
        await asyncio.wait({towards, returning}, return_when=asyncio.FIRST_COMPLETED)
        for task in (towards, returning):
            task.cancel()
        writer.transport.abort()
        back.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, silenced: Weather) -> None:
        """One direction, until the source ends or the weather cuts it."""
        left = self._cut_after
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                while self._weather in (Weather.PARTITION, silenced):
                    await self._changed.wait()
                if self._weather is Weather.SLOW:
                    await asyncio.sleep(self._delay)
                if self._weather is Weather.CUT:
                    if len(data) >= left:
                        sink.write(data[:left])
                        return
                    left -= len(data)
                sink.write(data)
                await sink.drain()
