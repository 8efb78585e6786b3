"""How much memory a model may take, and what it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from workers.engine import ModelDoesNotFit
from workers.model.checkpoint import EMBEDDING, HEAD, expected_shapes
from workers.model.config import ModelConfig

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_ATTENTION_BYTES = 192 << 20
"""Scores, weights and gathered K and V of the largest tile group."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that running a model takes."""

    weights: int
    step: int
    """Beside weights and pool, while a step runs."""
    block: int
    """One KV block."""
    least_blocks: int
    """A smaller pool is of no use."""

    def left(self, bound: int) -> int:
        """What ``bound`` leaves for the pool."""
        return bound - self.weights - self.step

    def check(self, bound: int, blocks: int) -> None:
        """Raise ModelDoesNotFit when a pool of so many blocks exceeds ``bound``."""
        if blocks * self.block > self.left(bound):
            raise ModelDoesNotFit(
                f"the model does not fit: weights of {human_bytes(self.weights)}, {human_bytes(self.step)} for a step "
                f"and a KV pool of {human_bytes(blocks * self.block)} are needed, {human_bytes(bound)} are available"
            )


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes this process may still take on the host: what the kernel says is available, or what its cgroup leaves."""
    return min(_meminfo_available(meminfo), _cgroup_left(cgroup))


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights in torch: ``itemsize`` a value, but for the head that makes logits in fp32."""
    shapes = expected_shapes(config)
    shapes.pop(HEAD, None)
    head = math.prod(shapes[EMBEDDING]) * 4
    return sum(math.prod(shape) for shape in shapes.values()) * itemsize + head


def working_bytes(config: ModelConfig, max_tokens: int, max_rows: int) -> int:
    """Bytes a step in torch takes beside weights and pool, about: activations, attention, logits and sampling."""
    heads = config.num_heads + 2 * config.num_kv_heads
    per_token = 4 * (4 * config.hidden_size + 4 * config.intermediate_size + 6 * heads * config.head_dim)
    per_row = 4 * 3 * config.vocab_size
    return max_tokens * per_token + max_rows * per_row + _ATTENTION_BYTES


def human_bytes(count: float) -> str:
    """Such as 17 KiB, 538 MiB, 12.3 GiB."""
    if count < 1 << 20:
        return f"{max(0.0, count) / (1 << 10):.0f} KiB"
    return f"{count / (1 << 20):.0f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def _meminfo_available(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 1 << 62  # not Linux: nothing to go by
    available = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(available.split()[1]) * 1024 if available else 1 << 62


def _cgroup_left(root: Path) -> int:
    """Version 2, then version 1; no limit is a very large number."""
    for limit_file, used_file in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory" / "memory.limit_in_bytes", root / "memory" / "memory.usage_in_bytes"),
    ):
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        return 1 << 62 if limit == "max" else max(0, int(limit) - int(used) + _reclaimable(limit_file.parent))
    return 1 << 62


def _reclaimable(directory: Path) -> int:
    """Page cache that the kernel drops when the group needs memory; mapped weights live there."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {parts[0]: int(parts[1]) for line in lines if len(parts := line.split()) == 2}
    return counts.get("inactive_file", counts.get("total_inactive_file", 0))
