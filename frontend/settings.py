"""What a frontend process is told at its start."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.keys import ConnectorSecurity, PeerRole, connector_security

MEBIBYTE = 1 << 20


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a frontend needs to know; built once from the command line and passed down. Times in seconds."""

    model: str
    """A directory, a .gguf file or a hub name: the same MODEL the workers were given."""
    scheduler: str
    """Address of the scheduler's frontend socket."""
    tokenizer: Literal["model", "byte"] = "model"
    """``model``, or ``byte`` for the scripted and simulated engines."""
    served_model_names: tuple[str, ...] = ()
    """Names accepted in requests; the first is echoed, and is the name on the scheduler's wire. Empty: the model's."""
    keys: str = ""
    """Folder of key files (protocol/keys.py) for a scheduler on TCP; empty: no encryption."""
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
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """How templates get contents: as one string, as a list of parts, or as the template's text suggests."""
    default_chat_template_kwargs: dict[str, Any] = {}
    trust_request_chat_template: bool = False
    """Requests may bring a template of their own."""
    allow_special_tokens_in_content: bool = False
    """Special-token text of users is special tokens instead of text."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto`` takes sampling defaults from the model's generation_config.json, ``none`` does not."""
    max_model_len: int = 0
    """Caps prompt + output; 0 leaves the model's own limit."""
    revision: str = ""
    download_dir: str = ""
    strict_fields: bool = False
    """Unknown request fields are a 400 instead of a note in a response header."""
    strict_limits: bool = False
    """An output limit beyond the room left is a 400 instead of being clamped."""
    max_logprobs: int = 20
    """Most alternatives a token."""
    return_tokens_as_token_ids: bool = False
    """Logprobs name tokens ``token_id:N`` without being asked."""
    force_include_usage: bool = False
    """Every stream ends with usage."""
    separate_finish_chunk: bool = False
    """finish_reason always rides on an empty delta."""
    early_commit: float = 10.0
    """A stream's status is sent this long after admission even when no token is there yet."""
    ping_interval: float = 15.0
    """A comment keeps a committed stream alive after so long without a chunk."""
    scheduler_grace: float = 30.0
    """How long requests are held while no scheduler or model is there."""
    peer_timeout: float = 10.0
    drain_timeout: float = 30.0
    keep_alive: float = 75.0
    max_body_bytes: int = 8 * MEBIBYTE
    max_bodies_bytes: int = 64 * MEBIBYTE
    """Of all request bodies that are being read or prepared."""
    max_header_bytes: int = 16 * 1024
    """Of one request: its request line and headers."""
    max_preparing: int = 1024
    """Most requests between their arrival and their Submit: held, being rendered or being tokenised."""
    tokenizer_threads: int = 2

    api_key_digests: tuple[str, ...] = ()
    """SHA-256 of each key given on the command line, in hex; the keys themselves go nowhere."""
    api_key_file: str = ""
    """A file of keys (see ``frontend.http.keys``)."""
    prefix_caching: bool = True
    """Prompts are named block by block, so that groups may reuse what they computed before."""
    prefix_share: Literal["key", "tenant", "all"] = "key"
    """Whose prompts may share cached prefixes."""
    metrics_public: bool = False
    """/metrics on the API port needs no key."""
    metrics_port: int = -1
    """Port of a server of its own for /metrics, open to all who reach it; -1 for none."""
    metrics_host: str = "127.0.0.1"
    docs: Literal["public", "key", "off"] = "key"
    """Who may read /docs and /openapi.json."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API; ``*`` is every one."""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_ca_certs: str = ""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Client certificates: 0 none, 1 optional, 2 required."""

    def scheduler_security(self) -> ConnectorSecurity:
        """How the connection to the scheduler is secured. Raises KeysError."""
        return connector_security(self.keys, PeerRole.FRONTEND, insecure_sockets=self.insecure_sockets)
