"""What a scheduler is told at its start."""

from __future__ import annotations

import msgspec

from scheduler.group_policy import GroupPolicy
from scheduler.step_watch import StepTimes


class CellSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and times of the pure part."""

    max_queue_requests: int = 1024
    """Choices that wait for a group, fresh ones; what was accepted is never refused later."""
    max_queue_tokens: int = 1_000_000
    watermark: float = 0.01
    """Share of a group's blocks, at least one, that admissions leave free."""
    model_grace: float = 120.0
    """Seconds a known model may be without a group before its waiting requests are refused."""
    max_queue_seconds: float = 0.0
    """Longest that a fresh request waits before it is refused after all; 0 is no limit."""
    priority_aging: float = 10.0
    """Seconds of waiting that are worth one priority level; 0: waiting is worth nothing."""
    tenant_quantum: int = 2048
    """Tokens a tenant gets each time its turn comes."""
    exact_wait: float = 60.0
    """Seconds that a request with output waits for a group of its numeric class."""
    exact_only: bool = False
    """After that it fails, instead of going on in another class."""
    step_times: StepTimes = StepTimes()
    group: GroupPolicy = GroupPolicy()


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler process. Seconds, except where a name says otherwise."""

    frontend_bind: str
    worker_bind: str
    keys: str = ""
    """Folder of key files (protocol/keys.py) for sockets on TCP; empty: no encryption."""
    insecure_sockets: bool = False
    peer_timeout: float = 10.0
    drain_timeout: float = 30.0
    max_queue_requests: int = 1024
    max_queue_tokens: int = 1_000_000
    watermark: float = 0.01
    model_grace: float = 120.0
    max_queue_seconds: float = 0.0
    priority_aging: float = 10.0
    tenant_quantum: int = 2048
    prefix_caching: bool = True
    prefill_stretch: float = 4.0
    long_prefill_threshold: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """0: no metrics server of its own; frontends relay the gauges."""
    trace_memory: int = 16 << 20
    """Bytes of the ring that holds the last steps; 0: none."""
    trace_dir: str = ""
    """Where the ring is written on SIGUSR1; empty: the system's folder for temporary files."""
    exact_wait: float = 60.0
    exact_only: bool = False
    lease: str = ""
    """Path of the supervisor's unix socket; empty: none."""
    name: str = "scheduler"

    def cell(self) -> CellSettings:
        """The pure part's share."""
        return CellSettings(
            max_queue_requests=self.max_queue_requests,
            max_queue_tokens=self.max_queue_tokens,
            watermark=self.watermark,
            model_grace=self.model_grace,
            exact_wait=self.exact_wait,
            exact_only=self.exact_only,
            max_queue_seconds=self.max_queue_seconds,
            priority_aging=self.priority_aging,
            tenant_quantum=self.tenant_quantum,
            group=GroupPolicy(
                prefix_caching=self.prefix_caching,
                prefill_stretch=self.prefill_stretch,
                long_prefill_threshold=self.long_prefill_threshold,
            ),
        )
