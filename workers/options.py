"""How a rank is told what to run: one frozen struct, handed over as JSON to a subprocess or a Ray actor."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.keys import ConnectorSecurity, PeerRole, connector_security


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs. Built by a launcher from the command line."""

    model: str
    """A directory, a GGUF file, or a hub name."""
    served_model_name: str
    group: str
    incarnation: int
    rank: int = 0
    tp: int = 1
    scheduler: str
    """Address of the scheduler's worker socket."""
    keys: str = ""
    """Folder of key files (protocol/keys.py) on the rank's host, for a scheduler on TCP; empty: no encryption."""
    insecure_sockets: bool = False
    lease: str = ""
    """Path of the supervisor's unix socket; empty: the lease is the session with a scheduler."""
    orphan_ttl: float = 300.0
    """Seconds without a session after which a rank with no supervisor ends itself."""
    peer_timeout: float = 10.0
    drain_timeout: float = 30.0
    """Seconds that a group which is told to end gets for what it runs."""
    engine: Literal["model", "scripted", "simulated"] = "model"
    engine_script: str = ""
    tokenizer: Literal["model", "byte"] = "model"
    """Which vocabulary a scripted or simulated engine speaks."""
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = ""
    """int8: matrices with one scale per output channel, on the native CPU library; empty: as ``dtype`` says."""
    kv_cache_dtype: str = "auto"
    """auto, bfloat16 or int8 (per token and KV head)."""
    revision: str = ""
    download_dir: str = ""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Slots; None: 64 on CPU, 256 on CUDA."""
    max_num_batched_tokens: int | None = None
    """Tokens a step; None: 512 on CPU, 8192 on CUDA."""
    kv_cache_memory: int | None = None
    """Bytes of KV pool; None: 512 MiB on CPU, what gpu_memory_utilization leaves on CUDA."""
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    threads: int = 0
    """0: as many as the process may use."""
    step_log: str = ""
    """File for one JSON line per step; empty: none."""

    def scheduler_security(self) -> ConnectorSecurity:
        """How the connection to the scheduler is secured. Raises KeysError."""
        return connector_security(self.keys, PeerRole.WORKER, insecure_sockets=self.insecure_sockets)
