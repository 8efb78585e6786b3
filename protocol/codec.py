"""Bytes to messages and back: one typed decoder per direction, and one error for whatever does not decode."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from protocol.base import Wire
from protocol.frontend import FrontendToScheduler, SchedulerToFrontend
from protocol.worker import SchedulerToLauncher, SchedulerToLeader, WorkerSideToScheduler

MessageT = TypeVar("MessageT")


class FrameError(ValueError):
    """A frame that is not a message of its direction: drop it, count it, and do nothing else."""


class Decoder(Generic[MessageT]):
    """Decodes one direction's union. Holds no state between calls."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | memoryview) -> MessageT:
        """The message in a frame; raises FrameError for everything else."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
            # msgspec reports deep nesting as RecursionError, and a str that is not UTF-8 as UnicodeDecodeError.
            raise FrameError(str(error)) from error


_encoder = msgspec.msgpack.Encoder()


def encode(message: Wire) -> bytes:
    """The frame of a message. A fresh buffer each time: pyzmq may keep it until the send completes."""
    return _encoder.encode(message)


frontend_to_scheduler: Decoder[FrontendToScheduler] = Decoder(FrontendToScheduler)
scheduler_to_frontend: Decoder[SchedulerToFrontend] = Decoder(SchedulerToFrontend)
worker_side_to_scheduler: Decoder[WorkerSideToScheduler] = Decoder(WorkerSideToScheduler)
scheduler_to_leader: Decoder[SchedulerToLeader] = Decoder(SchedulerToLeader)
scheduler_to_launcher: Decoder[SchedulerToLauncher] = Decoder(SchedulerToLauncher)
