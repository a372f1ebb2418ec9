"""A server in a thread of this process, for benchmarks that look at its engines too."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from volley.serve.config import ServeConfig
from volley.serve.server import Server
from volley.serve.service import Service


@contextmanager
def serving(services: Sequence[Service], config: ServeConfig) -> Iterator[str]:
    """Yields its URL; answers what is under way before it stops."""
    server = Server(list(services), config)
    thread = threading.Thread(target=server.run)
    thread.start()
    server.listening.wait()
    try:
        yield "http://{}:{}".format(*server.address)
    finally:
        server.drain()
        thread.join()
