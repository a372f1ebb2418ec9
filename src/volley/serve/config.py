"""Options of the server and the API keys that it accepts."""

import hashlib
import hmac
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from volley.errors import ConfigError, check_fields

KEY_VARIABLE = "VOLLEY_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the server. Sizes and times limit what one client can cost the others."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8000
    """Port to listen on; 0 lets the system choose."""
    served_model_name: str | None = None
    """Name that clients give as model; by default the target folder's."""
    answer_format: str = "auto"
    """Format of reasoning and tool calls in answers: auto detects it from the chat template; none, a format's name, or a JSON
    file."""
    bare_calls: bool = True
    """Under tool_choice auto, treat an answer that is one JSON object with a tool's name and valid arguments as a call."""
    chat_template: str | None = None
    """Name of one of the tokenizer's chat templates, or file of a Jinja template, to use for every conversation."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults of requests: auto takes those of the model's generation config; none takes OpenAI's."""
    api_key_file: Path | None = None
    """File of accepted API keys, one per line. Without it the variable VOLLEY_API_KEY holds one; without both, no key is
    required."""
    max_waiting: int = 256
    """Requests that may queue beside the running ones; further ones get 429."""
    request_timeout: float = 600.0
    """Seconds that one request may take, including the queue."""
    receive_timeout: float = 20.0
    """Seconds within which a client must send its headers, and again its body."""
    max_body_bytes: int = 1_048_576
    """Largest request body in bytes."""
    shutdown_timeout: float = 60.0
    """Seconds that running requests get to finish after SIGTERM."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server, * for all; none by default."""
    strict: bool = False
    """Refuse requests with unknown fields instead of ignoring the fields."""
    log_prompts: bool = False
    """Log request bodies, prompts included."""

    def __post_init__(self) -> None:
        positive = ("request_timeout", "receive_timeout", "max_body_bytes", "shutdown_timeout")
        check_fields(
            self,
            ("port", 0 <= self.port < 65536, "between 0 and 65535"),
            ("max_waiting", self.max_waiting >= 0, "0 or more"),
            *((name, getattr(self, name) > 0, "more than 0") for name in positive),
        )

    def check_address(self) -> None:
        """Raise :class:`ConfigError` if the address cannot be listened on: to be told before a model is loaded."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
        except OSError as error:
            raise ConfigError(
                f"{self.host}:{self.port} cannot be listened on ({error.strerror}); choose another --port or --host"
            ) from None


class ApiKeys:
    """Accepted API keys, stored as digests. A check takes the same time for any input."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, file: Path | None) -> "ApiKeys":
        """Load the keys of a file (skipping blank lines and lines that begin with #), or the key in the environment."""
        if file is None:
            key = os.environ.get(KEY_VARIABLE, "").strip()
            return cls([key] if key else [])
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the API keys in {file} cannot be read ({error}); give a text file, one key a line"
            ) from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"{file} holds no API key; write one a line, or leave --api-key-file out to ask for none")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode(errors="replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)
