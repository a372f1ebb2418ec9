"""uvicorn server that cuts off slow clients, finishes running requests on SIGTERM, and reloads drafters on SIGUSR1."""

import asyncio
import logging
import signal
import socket
import threading
import time
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from volley.errors import ParallelError
from volley.serve import logs
from volley.serve.app import create_app
from volley.serve.config import ApiKeys, ServeConfig
from volley.serve.service import Service

log = logging.getLogger("volley.serve")

_KEEP_ALIVE_SECONDS = 30
_SEND_OFF_SECONDS = 5  # time to send the last answers after every job has ended


class PatientProtocol(H11Protocol):
    """HTTP/1.1 protocol with a limit on the time to receive headers, which uvicorn lacks."""

    receive_timeout: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.receive_timeout, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.receive_timeout, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class Server(uvicorn.Server):
    """Server that refuses new requests and finishes running ones on the first signal, and stops at once on the second."""

    def __init__(self, service: Service, config: ServeConfig) -> None:
        self.service = service
        app = create_app(service, config)
        self._shutdown_timeout = config.shutdown_timeout
        self.address = (config.host, config.port)
        """Address of the server, final once :attr:`listening` is set."""
        self.listening = threading.Event()
        self._drain_until = 0.0
        self._reloading: list[asyncio.Task[bool]] = []
        protocol = type("Protocol", (PatientProtocol,), {"receive_timeout": config.receive_timeout})
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_SEND_OFF_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.reload)
            self.address = self.servers[0].sockets[0].getsockname()[:2]
            self.listening.set()
            url = "http://{}:{}".format(*self.address)
            service = self.service
            limit = {} if service.most_tokens is None else {"max_tokens": service.most_tokens}
            sampling = {"sampling": service.sampling | limit}
            log.info("listening", extra={"fields": {"url": url, "model": service.model, **sampling, **service.memory}})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            self.should_exit = self.force_exit = True
        self.drain()

    def reload(self) -> None:
        """Reload the drafter from its folder. Without one, log an error."""
        self._reloading = [task for task in self._reloading if not task.done()]
        self._reloading.append(asyncio.create_task(self.service.reload_drafter()))

    def drain(self) -> None:
        """Accept no new requests. Stop when running requests have ended or the time limit is over."""
        self.service.draining = True
        self._drain_until = self._drain_until or time.monotonic() + self._shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        if isinstance(self.service.worker.fatal, ParallelError):
            self.should_exit = True  # the other ranks end with this process; torchrun may restart all
        if self.service.draining:
            late = time.monotonic() > self._drain_until
            if late:
                self.service.worker.stop_soon()
            if late or self.service.held == 0:
                self.should_exit = True
        return await super().on_tick(counter)


def serve(service: Service, config: ServeConfig) -> None:
    """Serve until a signal ends it."""
    logs.configure()
    if config.host not in ("127.0.0.1", "::1", "localhost") and not ApiKeys.load(config.api_key_file):
        log.warning("no API keys are set: anyone who can reach this address can use the server")
    Server(service, config).run()
