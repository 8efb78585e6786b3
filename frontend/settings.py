"""What a frontend process is told at its start."""

from __future__ import annotations

from typing import Any

import msgspec

MEBIBYTE = 1 << 20


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a frontend needs to know; built once from the command line and passed down. Times in seconds."""

    model: str
    """A directory, a .gguf file or a hub name: the same MODEL the workers were given."""
    scheduler: str
    """Address of the scheduler's frontend socket."""
    tokenizer: str = "model"
    """``model``, or ``byte`` for the scripted and simulated engines."""
    served_model_names: tuple[str, ...] = ()
    """Names accepted in requests; the first is echoed, and is the name on the scheduler's wire. Empty: the model's."""
    insecure_sockets: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    fd: int = -1
    """An inherited listening socket, which wins over host and port."""
    root_path: str = ""
    name: str = "frontend"
    """This instance's name, sent as ``x-headrace-frontend``."""
    lease: str = ""
    """The supervisor's lease socket; empty when nobody supervises."""
    chat_template: str = ""
    """A template, or the path of a file with one, that overrides the model's."""
    default_chat_template_kwargs: dict[str, Any] = {}
    generation_config: str = "auto"
    """``auto`` takes sampling defaults from the model's generation_config.json, ``none`` does not."""
    max_model_len: int = 0
    """Caps prompt + output; 0 leaves the model's own limit."""
    revision: str = ""
    download_dir: str = ""
    strict_fields: bool = False
    """Unknown request fields are a 400 instead of a note in a response header."""
    scheduler_grace: float = 30.0
    """How long requests are held while no scheduler or model is there."""
    peer_timeout: float = 10.0
    drain_timeout: float = 30.0
    keep_alive: float = 75.0
    max_body_bytes: int = 8 * MEBIBYTE
    max_preparing: int = 1024
    """Most requests between their arrival and their Submit: held, being rendered or being tokenised."""
    tokenizer_threads: int = 2
