"""What the scheduler's own /metrics tell of the queue, and that their labels are few whatever clients send."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from protocol.transport import TransportStatistics
from scheduler.doors import DoorStatistics
from scheduler.loop import SchedulerStatistics
from scheduler.metrics import SchedulerCollector
from scheduler.settings import CellSettings
from tests.scheduler.fake_worker import register
from tests.scheduler.rig import Rig, submit


def exposition(rig: Rig) -> list[str]:
    door = DoorStatistics(1, 0, TransportStatistics(0, 0, 0, 0, 0, 0, 0))
    picture = SchedulerStatistics(1, rig.cell.statistics(), rig.cell.load(rig.now), door, door)
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(lambda: picture))
    return generate_latest(registry).decode().splitlines()


def test_the_queue_is_told_by_classes_of_priority_and_tenants_by_their_number() -> None:
    rig = Rig(CellSettings(max_queue_requests=4))
    rig.group(register(max_slots=1))
    frontend = rig.frontend()
    for rid, priority in enumerate((0, -50, -3, 0, 90, -1, 70), 1):
        rig.submit(frontend, submit(rid, priority=priority, tenant=f"tenant-{rid}"))
    lines = exposition(rig)
    for line in (
        'headrace_waiting_by_priority{priority="urgent"} 3.0',
        'headrace_waiting_by_priority{priority="normal"} 1.0',
        'headrace_waiting_by_priority{priority="background"} 0.0',
        "headrace_requests_waiting 4.0",
        "headrace_tenants 5.0",
        "headrace_shed_total 1.0",
        'headrace_submits_rejected_total{code="overloaded"} 2.0',
        "headrace_credit_requests 0.0",
        "headrace_queue_timeouts_total 0.0",
    ):
        assert line in lines
    assert not any("tenant-" in line for line in lines)
