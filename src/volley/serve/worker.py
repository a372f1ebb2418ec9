"""The thread that owns the engine, and the jobs through which an event loop talks to it.

Nothing else touches the engine once the worker runs. The loop hands in jobs and aborts through a queue; after every step the
worker hands all new events to the loop in one call. On a GPU it does so within the next step, while the device works: the loop
then writes to its clients beside a thread that waits, and does not hold up the next launch.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from volley.engine.engine import Engine
from volley.engine.recovery import recover
from volley.engine.reload import replace_drafter
from volley.errors import VolleyError
from volley.models.drafters.drafter import Drafter
from volley.procedures.request import Request
from volley.serve.metrics import Metrics
from volley.types import CanvasDraft, FinishReason, GenerationStats, SamplingParams, TextChunk

log = logging.getLogger("volley.serve")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice: a chunk for each token."""

    choice: int
    chunks: list[TextChunk]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Sketched:
    """What stands on the canvas of a choice; it may still change."""

    choice: int
    draft: CanvasDraft


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities of a choice's prompt, all tokens but the first; they come before anything else of it."""

    choice: int
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class End:
    """A choice is complete."""

    choice: int
    finish_reason: FinishReason
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class Failure:
    """The job ends here: a refused request (``VolleyError``), or an error inside the engine."""

    error: Exception


Event = Scored | Piece | Sketched | End | Failure


class QueueFull(Exception):
    """More requests than the server holds; ``retry_after`` is a guess in seconds."""

    def __init__(self, held: int, retry_after: int) -> None:
        super().__init__(f"the server already holds {held} requests; try again in about {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The worker ended before the job did."""

    def __init__(self, *, is_dead: bool = False) -> None:
        """``is_dead``: the engine broke down, and nobody stopped it."""
        super().__init__("the engine has stopped" if is_dead else "the server is shutting down")
        self.is_dead = is_dead


class Job:
    """What one HTTP request asks for: one choice for each prompt of token ids. Made and read by the event loop."""

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
        """Who asks: an API key or an address."""
        self.may_be_kept = may_be_kept
        """Whether the client lets the server keep the answer, if it said so."""
        self.arrived = time.perf_counter()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.requests: list[Request] = []
        """Owned by the worker."""


@dataclass(frozen=True)
class Swap:
    """A drafter, and its adapters' folders by name, to take the place of the engine's."""

    drafter: Drafter
    adapters: Mapping[str, str]
    done: "Future[None]" = field(default_factory=Future)


_Command = tuple[str, Job | Swap | None]


class Worker:
    """Steps an engine in a thread of its own for jobs that come from one event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, max_waiting: int) -> None:
        """``max_waiting`` requests may queue beside those that the engine runs at once."""
        self.engine = engine
        self._max_waiting = max_waiting
        self.metrics = metrics
        self.capacity = engine.snapshot().max_running + max_waiting
        self.held = 0
        """Requests handed in and not yet over, as the event loop knows; it alone writes this."""
        self.fatal: BaseException | None = None
        """Why the worker died, if it did."""
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._end_of_inbox, self._has_ended = threading.Lock(), False  # nothing is put in after the last was taken out
        self._owner: dict[Request, tuple[Job, int]] = {}
        self._outbox: list[tuple[Job, Event]] = []
        self._handed_in = self._opened = 0  # jobs; the event loop counts the first, the thread the second
        self._left = 0
        self._seconds = 1.0  # a request's usual time, for Retry-After
        self._thread = threading.Thread(target=self._run, name="volley-engine", daemon=True)
        self.on_finished: list[Callable[[Job, Request], None]] = []
        """Called by the thread for each answer that is complete."""
        self.on_held: list[Callable[[int], None]] = []
        """Called by the event loop with :attr:`held` when it has changed."""
        engine.on_verified.append(metrics.verified)
        engine.arrivals.newcomers = self._has_newcomers
        engine.overlap.listeners.append(self._publish)

    # -- the event loop's side -----------------------------------------------------------------------------------------
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread.start()

    def stop_soon(self) -> None:
        """End every job with :class:`Stopped`, then the thread."""
        self._inbox.put(("stop", None))

    def stop(self) -> None:
        """The same, and return when the thread has ended."""
        self.stop_soon()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.fatal is None

    def check_room(self, answers: int = 1) -> None:
        """Raises :class:`QueueFull` where so many more would be too many."""
        if self.held + answers > self.capacity:
            rounds = self.held / (self.capacity - self._max_waiting)
            raise QueueFull(self.held, min(60, max(1, math.ceil(rounds * self._seconds))))

    def submit(self, job: Job) -> None:
        """Queue a job; its events come to ``job.events``. Raises :class:`QueueFull`, and :class:`Stopped` after the end."""
        self.check_room(len(job.prompts))
        with self._end_of_inbox:
            if self._has_ended:
                raise self._stopped()
            self._inbox.put(("submit", job))
        self._hold(len(job.prompts))
        self._handed_in += 1

    def abort(self, job: Job) -> None:
        """Give up what is left of a job; harmless when nothing is."""
        self._inbox.put(("abort", job))

    def swap(self, drafter: Drafter, adapters: Mapping[str, str]) -> "Future[None]":
        """Replace the drafter between two steps; the future is done when it is, or has the error that kept the old one."""
        swap = Swap(drafter, adapters)
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
                if not (self.engine.overlap.is_used and self.engine.has_work):  # else the next step does it on its way
                    self._publish()
        except BaseException as error:
            log.critical("the engine's worker died", exc_info=error)
            self.fatal = error
        self._end()

    def _end(self) -> None:
        """Nothing runs any more: say so to every job, including those that have only just come in."""
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
        """Carry out what has come in, waiting for something when there is nothing else to do. False: stop."""
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
            replace_drafter(self.engine, swap.drafter, swap.adapters)
            swap.done.set_result(None)
        except Exception as error:
            swap.done.set_exception(error)

    def _has_newcomers(self) -> bool:
        """Whether jobs have come in during the step, and the engine has room for another request."""
        if self._handed_in == self._opened:
            return False
        now = self.engine.snapshot()
        return now.running < now.max_running

    def _open(self, job: Job) -> None:
        self._opened += 1
        try:
            first: dict[int, Request] = {}  # of each prompt: the others share what it has read
            for choice, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
                request = self.engine.add_request(prompt, params, after=first.get(id(prompt)))
                request.arrived = job.arrived  # it has waited for the end of a step
                first.setdefault(id(prompt), request)
                job.requests.append(request)
                self._owner[request] = (job, choice)
        except Exception as error:
            self._left += len(job.prompts) - len(job.requests)
            self._fail(job, error)

    def _close(self, job: Job) -> None:
        """Free what the job still holds."""
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
        """Tell the loop what the last step brought."""
        for request, (job, choice) in list(self._owner.items()):
            if request not in self._owner:  # its job has failed by another choice
                continue
            request.write()
            is_first = request.num_output == len(request.chunks) and (
                request.chunks or request.finish_reason is not None
            )
            if is_first and request.params.prompt_logprobs is not None:
                scored = Scored(choice, request.prompt_logprobs, request.prompt_top_logprobs, request.prompt_ranks)
                self._outbox.append((job, scored))
            if request.chunks:
                done, now = request.num_output - len(request.chunks), request.num_output
                piece = Piece(choice, request.chunks, request.logprobs[done:now], request.top_logprobs[done:now])
                self._outbox.append((job, piece))
                request.chunks = []
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
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is listening
                self.loop.call_soon_threadsafe(self._deliver, self._outbox, self._left)
            self._outbox, self._left = [], 0
