"""Thread that owns the engine, and the jobs by which an event loop communicates with it.

Once the worker runs, only its thread touches the engine. The loop submits jobs and aborts through a queue. After every step the
worker hands all new events to the loop in one call. On a GPU it does so during the next step, while the device works: the loop
then writes to its clients while the thread waits, and does not delay the next launch.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from volley.decode.sampling import Score
from volley.engine.engine import Engine
from volley.engine.recovery import recover
from volley.engine.reload import replace_drafter
from volley.errors import VolleyError
from volley.models.drafters.drafter import Drafter
from volley.params import SamplingParams
from volley.procedures.request import Request
from volley.results import CanvasDraft, FinishReason, GenerationStats, TextChunk
from volley.serve.metrics import Metrics

log = logging.getLogger("volley.serve")


@dataclass(frozen=True, slots=True)
class Piece:
    """Output of one step for one choice: one chunk per token."""

    choice: int
    chunks: list[TextChunk]
    scores: list[Score]
    """Scores of its tokens, if requested."""


@dataclass(frozen=True, slots=True)
class Sketched:
    """Current canvas of a choice, which may still change."""

    choice: int
    draft: CanvasDraft


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a choice's prompt without its first token, sent before all other events of the choice."""

    choice: int
    scores: list[Score]


@dataclass(frozen=True, slots=True)
class End:
    """End of a choice."""

    choice: int
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of the job: a refused request (``VolleyError``) or an error inside the engine."""

    error: Exception


Event = Scored | Piece | Sketched | End | Failure


class QueueFull(Exception):
    """Raised if the server is full. ``retry_after`` is an estimate in seconds."""

    def __init__(self, held: int, retry_after: int) -> None:
        super().__init__(f"the server already holds {held} requests; try again in about {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """Raised if the worker ends before the job."""

    def __init__(self, *, is_dead: bool = False) -> None:
        """Create the error. ``is_dead``: the engine failed; otherwise it was stopped."""
        super().__init__("the engine has stopped" if is_dead else "the server is shutting down")
        self.is_dead = is_dead


class Job:
    """Work of one HTTP request: one choice per prompt of token ids. The event loop creates and reads it."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        client: str = "",
        may_be_kept: bool | None = None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.client = client
        """Client of the request: an API key or an address."""
        self.may_be_kept = may_be_kept
        """True or False if the client allows or forbids the server to keep the answer, ``None`` if it does not say."""
        self.arrived = time.perf_counter()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.requests: list[Request] = []
        """Requests of the engine, owned by the worker."""


@dataclass(frozen=True)
class Swap:
    """Replacement for the engine's drafter."""

    drafter: Drafter
    done: "Future[None]" = field(default_factory=Future)


_Command = tuple[str, Job | Swap | None]


class Worker:
    """Thread that steps an engine for jobs from one event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, max_waiting: int) -> None:
        """Create the worker. ``max_waiting`` requests may queue beyond those that the engine runs at once."""
        self.engine = engine
        self._max_waiting = max_waiting
        self.metrics = metrics
        self.capacity = engine.snapshot().max_running + max_waiting
        self.held = 0
        """Number of submitted requests that have not ended. Only the event loop changes it."""
        self.fatal: BaseException | None = None
        """Exception that ended the worker, if any."""
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._end_of_inbox, self._has_ended = threading.Lock(), False  # nothing is queued after the last get
        self._owner: dict[Request, tuple[Job, int]] = {}
        self._outbox: list[tuple[Job, Event]] = []
        self._handed_in = self._opened = 0  # jobs; the event loop counts the first, the thread the second
        self._left = 0
        self._seconds = 1.0  # typical duration of a request, for Retry-After
        self._thread = threading.Thread(target=self._run, name="volley-engine", daemon=True)
        self.on_finished: list[Callable[[Job, Request], None]] = []
        """Callbacks that the thread calls with each complete answer."""
        self.on_held: list[Callable[[int], None]] = []
        """Callbacks that the event loop calls with :attr:`held` when it changes."""
        engine.on_verified.append(metrics.verified)
        engine.arrivals.newcomers = self._has_newcomers
        engine.deferred_work.listeners.append(self._publish)

    # -- the event loop's side -----------------------------------------------------------------------------------------
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread.start()

    def stop_soon(self) -> None:
        """End every job with :class:`Stopped`, then the thread."""
        self._inbox.put(("stop", None))

    def stop(self) -> None:
        """End every job with :class:`Stopped`, then the thread, and wait for it."""
        self.stop_soon()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.fatal is None

    def check_room(self, answers: int = 1) -> None:
        """Raise :class:`QueueFull` if ``answers`` more requests do not fit the queue."""
        if self.held + answers > self.capacity:
            rounds = self.held / (self.capacity - self._max_waiting)
            raise QueueFull(self.held, min(60, max(1, math.ceil(rounds * self._seconds))))

    def submit(self, job: Job) -> None:
        """Queue a job, whose events arrive in ``job.events``. Raises :class:`QueueFull`, and :class:`Stopped` after the end."""
        self.check_room(len(job.prompts))
        with self._end_of_inbox:
            if self._has_ended:
                raise self._stopped()
            self._inbox.put(("submit", job))
        self._hold(len(job.prompts))
        self._handed_in += 1

    def abort(self, job: Job) -> None:
        """Abort the requests of a job that still run, if any."""
        self._inbox.put(("abort", job))

    def swap(self, drafter: Drafter) -> "Future[None]":
        """Replace the drafter between two steps. The future resolves then, or holds the error that kept the old drafter."""
        swap = Swap(drafter)
        with self._end_of_inbox:
            if self._has_ended:
                swap.done.set_exception(self._stopped())
            else:
                self._inbox.put(("swap", swap))
        return swap.done

    def _stopped(self) -> Stopped:
        return Stopped(is_dead=self.fatal is not None)

    def _hold(self, more: int) -> None:
        self.held += more
        for listener in self.on_held:
            listener(self.held)

    def _deliver(self, events: list[tuple[Job, Event]], left: int) -> None:
        if left:
            self._hold(-left)
        for job, event in events:
            if isinstance(event, End):
                self._seconds += 0.1 * (event.stats.total_seconds - self._seconds)
            job.events.put_nowait(event)

    # -- the thread's side ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._step()
                if not (self.engine.deferred_work.is_used and self.engine.has_work):  # else the next step does it
                    self._publish()
        except BaseException as error:
            log.critical("the engine's worker died", exc_info=error)
            self.fatal = error
        self._end()

    def _end(self) -> None:
        """Report the end to every job, including jobs submitted in the meantime."""
        jobs = {id(job): job for job, _ in self._owner.values()}
        for request in self._owner:
            if self.fatal is None:
                self.engine.abort(request)
        self._left += len(self._owner)
        self._owner.clear()
        with self._end_of_inbox:
            self._has_ended = True
        while not self._inbox.empty():
            command, job = self._inbox.get()
            if isinstance(job, Swap):
                if job.done.set_running_or_notify_cancel():
                    job.done.set_exception(self._stopped())
            elif command == "submit" and job is not None:
                jobs[id(job)] = job
                self._left += len(job.prompts)
        self._outbox += [(job, Failure(self._stopped())) for job in jobs.values()]
        self._hand_over()

    def _obey(self) -> bool:
        """Process the queue, waiting for an entry if the engine has no work. Return False to stop."""
        idle = not self.engine.has_work
        while idle or not self._inbox.empty():
            command, job = self._inbox.get()
            idle = False
            if job is None:
                return False
            if isinstance(job, Swap):
                self._swap(job)
            elif command == "submit":
                self._open(job)
            else:
                self._close(job)
        return True

    def _swap(self, swap: Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            replace_drafter(self.engine, swap.drafter)
            swap.done.set_result(None)
        except Exception as error:
            swap.done.set_exception(error)

    def _has_newcomers(self) -> bool:
        """Return whether jobs arrived during the step and the engine can run another request."""
        if self._handed_in == self._opened:
            return False
        now = self.engine.snapshot()
        return now.running < now.max_running

    def _open(self, job: Job) -> None:
        self._opened += 1
        try:
            first: dict[int, Request] = {}  # first request of each prompt; the others share its K/V
            for choice, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
                request = self.engine.add_request(prompt, params, after=first.get(id(prompt)))
                request.arrived = job.arrived  # it waited for the end of a step
                first.setdefault(id(prompt), request)
                job.requests.append(request)
                self._owner[request] = (job, choice)
        except Exception as error:
            self._left += len(job.prompts) - len(job.requests)
            self._fail(job, error)

    def _close(self, job: Job) -> None:
        """Free the resources that the job still holds."""
        for request in job.requests:
            if self._owner.pop(request, None) is not None:
                self.engine.abort(request)
                self._left += 1
                self.metrics.finished(request, "abort")

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, VolleyError):
            log.error("a request failed", exc_info=error)
        self._close(job)
        self._outbox.append((job, Failure(error)))

    def _step(self) -> None:
        started = time.perf_counter()
        try:
            self.engine.step()
        except Exception as error:
            log.error("a step failed; looking for the request at fault", exc_info=error)
            for request, own in recover(self.engine, error):
                if request in self._owner:
                    self.metrics.errors.inc()
                    self._fail(self._owner[request][0], own)
        self.metrics.stepped(self.engine, time.perf_counter() - started)

    def _publish(self) -> None:
        """Send the events of the last step to the loop."""
        for request, (job, choice) in list(self._owner.items()):
            if request not in self._owner:  # its job failed because of another choice
                continue
            request.write()
            chunks = request.writer.take()
            done = request.num_output - len(chunks)
            is_first = done == 0 and (chunks or request.finish_reason is not None)
            if is_first and request.params.prompt_logprobs is not None:
                self._outbox.append((job, Scored(choice, request.prompt_scores)))
            if chunks:
                self._outbox.append((job, Piece(choice, chunks, request.scores[done : request.num_output])))
            if (draft := request.take_draft()) is not None:
                self._outbox.append((job, Sketched(choice, draft)))
            if request.finish_reason is not None:
                del self._owner[request]
                self._left += 1
                self.metrics.finished(request, request.finish_reason)
                if request.failure is not None:
                    log.warning("a request ended: %s", request.failure)
                    self._fail(job, request.failure)
                    continue
                self._outbox.append((job, End(choice, request.finish_reason, request.stats)))
                for listener in self.on_finished:
                    listener(job, request)
        self._hand_over()
        self.metrics.state(self.engine)

    def _hand_over(self) -> None:
        if self._outbox or self._left:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening
                self.loop.call_soon_threadsafe(self._deliver, self._outbox, self._left)
            self._outbox, self._left = [], 0
