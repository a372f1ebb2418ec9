"""A server in a thread of this process, for benchmarks that look at its engine too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from volley.serve.config import ServeConfig
from volley.serve.server import Server
from volley.serve.service import Service


@contextmanager
def serving(service: Service, config: ServeConfig) -> Iterator[str]:
    """Yields its URL; answers what is under way before it stops."""
    server = Server(service, config)
    thread = threading.Thread(target=server.run)
    thread.start()
    server.listening.wait()
    try:
        yield "http://{}:{}".format(*server.address)
    finally:
        server.drain()
        thread.join()
