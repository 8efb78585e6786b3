"""What /metrics shows: this frontend's own counters, and the scheduler's state as its last ``Load`` told it.

Label values come from closed sets: routes, statuses, error codes, finish reasons, group names; never from a client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from frontend.session.scheduler_client import ClientStatistics
from protocol.frontend import PRIORITY_CLASSES, GroupLoad, Load

TTFT_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
E2E_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class TokenGaps:
    """Histogram of seconds between tokens. Counted once per chunk on the hot path, so it is plain arithmetic."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """``tokens`` arrived together, ``seconds`` after the one before them."""
        self._counts[bisect_left(TOKEN_SECONDS, seconds / tokens)] += tokens
        self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        buckets: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, TOKEN_SECONDS), "+Inf"), self._counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        family = HistogramMetricFamily("headrace_itl_seconds", "Seconds between tokens, as the frontend got them")
        family.add_metric([], buckets=buckets, sum_value=self._sum)
        yield family


class SchedulerCollector:
    """The scheduler's gauges and counters, and this frontend's link to it, read when scraped."""

    def __init__(self, load: Callable[[], Load | None], statistics: Callable[[], ClientStatistics]) -> None:
        self._load = load
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        statistics = self._statistics()
        yield GaugeMetricFamily(
            "headrace_scheduler_up",
            "1 while a session with the scheduler is open",
            float(bool(statistics.link.session)),
        )
        yield GaugeMetricFamily("headrace_open_choices", "Choices open with the scheduler", statistics.open_choices)
        yield GaugeMetricFamily(
            "headrace_stream_buffer_bytes", "Ids received that slow readers did not take yet", statistics.unread_bytes
        )
        yield GaugeMetricFamily(
            "headrace_credit_requests",
            "Choices that may still be submitted before requests are refused here",
            max(statistics.credit.requests_left, 0),
        )
        yield CounterMetricFamily(
            "headrace_requests_refused",
            "Requests refused with 429 for want of credit, before any work on them",
            statistics.credit.refused,
        )
        migrations = CounterMetricFamily(
            "headrace_request_migrations", "Choices submitted again, by cause", labels=["kind"]
        )
        for kind, count in statistics.resubmitted.items():
            migrations.add_metric([kind], count)
        yield migrations
        dropped = CounterMetricFamily(
            "headrace_zmq_frames_dropped", "Frames that were not understood", labels=["socket", "cause"]
        )
        dropped.add_metric(["frontend", "undecodable"], statistics.link.frames_dropped)
        dropped.add_metric(["frontend", "contradictory"], statistics.frames_malformed)
        load = self._load()
        if load is not None:
            dropped.add_metric(["scheduler", "undecodable"], load.frames_dropped)
            yield from _cell(load)
            yield from _groups(load.groups)
        yield dropped


def _cell(load: Load) -> Iterable[Metric]:
    yield GaugeMetricFamily("headrace_requests_running", "Requests in a group's slots", load.requests_running)
    yield GaugeMetricFamily("headrace_requests_waiting", "Requests not admitted yet", load.requests_waiting)
    yield GaugeMetricFamily("headrace_queue_tokens", "Prompt tokens of waiting requests", load.waiting_tokens)
    by_priority = GaugeMetricFamily(
        "headrace_waiting_by_priority", "Requests not admitted yet, by class of priority", labels=["priority"]
    )
    for name, count in zip(PRIORITY_CLASSES, load.waiting_by_priority, strict=False):
        by_priority.add_metric([name], count)
    yield by_priority
    yield CounterMetricFamily("headrace_shed", "Waiting requests that gave way to more urgent ones", load.shed)


def _groups(groups: tuple[GroupLoad, ...]) -> Iterable[Metric]:
    blocks = GaugeMetricFamily("headrace_kv_blocks", "KV blocks of a group, by state", labels=["group", "state"])
    usage = GaugeMetricFamily("headrace_kv_usage_ratio", "Share of KV blocks in use", labels=["group"])
    up = GaugeMetricFamily("headrace_worker_up", "1 while a group serves", labels=["group"])
    running = GaugeMetricFamily("headrace_group_requests_running", "Requests in this group's slots", labels=["group"])
    waiting = GaugeMetricFamily(
        "headrace_group_requests_waiting", "Requests placed on this group and not admitted", labels=["group"]
    )
    totals = {
        "preemptions": CounterMetricFamily("headrace_preemptions", "Requests preempted", labels=["group"]),
        "prompt_tokens": CounterMetricFamily(
            "headrace_prompt_tokens", "Prompt tokens of admitted requests", labels=["group"]
        ),
        "cached_tokens": CounterMetricFamily(
            "headrace_cached_prompt_tokens", "Of these, found in the prefix cache", labels=["group"]
        ),
        "generation_tokens": CounterMetricFamily("headrace_generation_tokens", "Tokens generated", labels=["group"]),
        "steps": CounterMetricFamily("headrace_steps", "Steps run", labels=["group"]),
        "step_seconds": CounterMetricFamily("headrace_step_seconds", "Seconds spent in steps", labels=["group"]),
    }
    for group in groups:
        free = group.blocks_total - group.blocks_used - group.blocks_cached
        for state, count in (("free", free), ("used", group.blocks_used), ("cached", group.blocks_cached)):
            blocks.add_metric([group.group, state], count)
        usage.add_metric([group.group], group.blocks_used / group.blocks_total if group.blocks_total else 0.0)
        up.add_metric([group.group], float(group.ready))
        running.add_metric([group.group], group.requests_running)
        waiting.add_metric([group.group], group.requests_waiting)
        totals["preemptions"].add_metric([group.group], group.preemptions)
        totals["prompt_tokens"].add_metric([group.group], group.prompt_tokens)
        totals["cached_tokens"].add_metric([group.group], group.cached_tokens)
        totals["generation_tokens"].add_metric([group.group], group.generation_tokens)
        totals["steps"].add_metric([group.group], group.steps)
        totals["step_seconds"].add_metric([group.group], group.step_us / 1e6)
    yield from (blocks, usage, up, running, waiting, *totals.values())


class Metrics:
    """The registry of one frontend and what is counted as it happens."""

    def __init__(
        self,
        load: Callable[[], Load | None],
        statistics: Callable[[], ClientStatistics],
        under_way: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "headrace_http_requests", "HTTP requests answered", ["route", "code"], registry=self.registry
        )
        inflight = Gauge("headrace_http_inflight", "HTTP requests being answered", registry=self.registry)
        inflight.set_function(under_way)
        self.errors = Counter(
            "headrace_request_errors", "Errors sent to clients, by code", ["code"], registry=self.registry
        )
        self.successes = Counter(
            "headrace_request_success", "Choices answered in full", ["finish_reason"], registry=self.registry
        )
        self.ttft = self._histogram("headrace_ttft_seconds", "Request received to first token", TTFT_SECONDS)
        self.tpot = self._histogram("headrace_tpot_seconds", "Mean seconds per token after the first", TOKEN_SECONDS)
        self.e2e = self._histogram("headrace_e2e_seconds", "Request received to answer complete", E2E_SECONDS)
        self.disconnects = Counter(
            "headrace_client_disconnects", "Clients gone before their answer was complete", registry=self.registry
        )
        self.stalls = Counter(
            "headrace_slow_client_stalls", "Chunks that waited for a client to read", registry=self.registry
        )
        self.gaps = TokenGaps()
        self.registry.register(self.gaps)
        self.registry.register(SchedulerCollector(load, statistics))

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
