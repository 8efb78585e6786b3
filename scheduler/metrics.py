"""The scheduler's own /metrics, for hosts without a frontend; elsewhere frontends relay the gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.frontend import PRIORITY_CLASSES, GroupLoad
from scheduler.loop import SchedulerStatistics

GROUP_COUNTERS: tuple[tuple[str, str, Callable[[GroupLoad], float]], ...] = (
    ("preemptions", "Preemptions by recompute.", lambda group: group.preemptions),
    ("prompt_tokens", "Prompt tokens of admitted requests.", lambda group: group.prompt_tokens),
    ("cached_prompt_tokens", "Of these, found in the prefix cache.", lambda group: group.cached_tokens),
    ("generation_tokens", "Output tokens.", lambda group: group.generation_tokens),
    ("steps", "Steps done.", lambda group: group.steps),
    ("step_seconds", "Time spent in steps.", lambda group: group.step_us / 1e6),
)


class SchedulerCollector(Collector):
    """Turns the last published statistics into metrics; takes no lock and touches no live object."""

    def __init__(self, published: Callable[[], SchedulerStatistics | None]) -> None:
        self._published = published

    def collect(self) -> Iterator[Metric]:
        """Metrics of the whole process and of each group."""
        statistics = self._published()
        if statistics is None:
            return
        load, cell = statistics.load, statistics.cell
        yield _gauge("requests_running", "Choices that hold a slot of a group.", load.requests_running)
        yield _gauge("requests_waiting", "Choices that wait for a group.", load.requests_waiting)
        yield _waiting_by_priority(load.waiting_by_priority)
        yield _gauge("waiting_tokens", "Prefill tokens of the waiting choices.", load.waiting_tokens)
        yield _gauge("frontend_sessions", "Frontends in session.", statistics.frontends.sessions)
        yield _gauge("worker_sessions", "Leaders and launchers in session.", statistics.workers.sessions)
        yield _gauge("tenants", "Tenants with something waiting or running.", cell.tenants)
        yield _gauge("credit_requests", "Choices that frontends together may still submit.", load.credit.requests)
        yield _gauge("credit_tokens", "Prompt tokens that frontends together may still submit.", load.credit.tokens)
        yield _gauge("retry_after_seconds", "What refused clients are told.", load.credit.retry_after_ms / 1000)
        yield _gauge("groups_draining", "Groups that end what they have and get nothing new.", cell.groups_draining)
        yield _counter("shed", "Waiting choices that gave way to more urgent ones.", load.shed)
        yield _counter("queue_timeouts", "Choices refused after they had waited too long.", cell.queue_timeouts)
        yield _counter("frames_dropped", "Frames that were no message.", load.frames_dropped)
        yield _counter("stale_steps", "Step results that answered no outstanding plan.", cell.stale_steps)
        yield _counter("group_losses", "Groups whose session ended.", cell.group_losses)
        yield _counter("requeues", "Choices queued again after a preemption or a loss.", cell.requeues)
        yield _counter("resumed_inexact", "Choices that went on in another numeric class.", cell.resumed_inexact)
        yield _labelled("requests_finished", "Finished choices.", "reason", cell.finished)
        yield _labelled("submits_rejected", "Rejected submits.", "code", cell.rejected)
        yield from _groups(load.groups)


def _waiting_by_priority(counts: tuple[int, ...]) -> Metric:
    family = GaugeMetricFamily(
        "headrace_waiting_by_priority", "Choices that wait for a group, by class of priority.", labels=["priority"]
    )
    for name, count in zip(PRIORITY_CLASSES, counts, strict=True):
        family.add_metric([name], count)
    return family


def _groups(groups: tuple[GroupLoad, ...]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("headrace_kv_blocks", "KV blocks by state.", labels=["group", "state"])
    for group in groups:
        free = group.blocks_total - group.blocks_used - group.blocks_cached
        for state, count in (("used", group.blocks_used), ("cached", group.blocks_cached), ("free", free)):
            blocks.add_metric([group.group, state], count)
    yield blocks
    for name, text, value in GROUP_COUNTERS:
        counter = CounterMetricFamily(f"headrace_{name}", text, labels=["group"])
        for group in groups:
            counter.add_metric([group.group], value(group))
        yield counter


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"headrace_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"headrace_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


@contextmanager
def metrics_server(host: str, port: int, published: Callable[[], SchedulerStatistics | None]) -> Iterator[None]:
    """Serve /metrics on a thread of its own; raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(published))
    server, thread = start_http_server(port, host, registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
