"""Recalibration inside a server: keep served answers, run the training process while the server is idle, swap drafters."""

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from volley.engine.engine import Engine
from volley.engine.memory import memory_of
from volley.engine.reload import replace_drafter
from volley.engine.start import warm_up
from volley.errors import ConfigError
from volley.files import REFERENCE, write_atomically
from volley.memory.device import find_device
from volley.models.drafters.draft_model import load_drafter
from volley.models.drafters.drafter import Drafter
from volley.models.layers.accelerate import weight_bytes
from volley.models.layers.fingerprint import drafter_fingerprint, target_fingerprint
from volley.models.targets.loading import load_causal_lm
from volley.models.targets.sharded import ShardedTarget
from volley.native import WantedDraftWeights
from volley.procedures.request import Request
from volley.recalibrate.figures import Figures
from volley.recalibrate.options import RecalibrateConfig
from volley.recalibrate.reservoir import Reservoir
from volley.recalibrate.state import BASE, Learnt, Standing
from volley.serve.service import Service
from volley.serve.worker import Job
from volley.train.shape import check_ends

log = logging.getLogger("volley.serve")

Kept = tuple[str, list[int], list[int], float]
PROGRAM = (sys.executable, "-m", "volley.recalibrate.process")
MOST_WAITING = 1000
"""Maximum number of answers that wait for the disk; more are dropped."""
CLEANING_SECONDS = 3600.0
"""Seconds without an answer after which the reservoir is cleaned."""
TRAINING_BYTES = 2**31
"""GPU bytes for a training's activations."""
RESTART_SECONDS = (5.0, 600.0)
"""First and longest delay before a dead training process is restarted."""


class Recalibrator:
    """Recalibration of one service's drafter. Create it before the service's worker starts."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        config: RecalibrateConfig,
        target: str,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Create the recalibration. ``target`` is the path of the engine's target; ``program`` is the training process."""
        assert config.recalibrate is not None
        _check(service, engine, target)
        self.folder, self.config = config.recalibrate, config
        self._service, self._engine, self._target = service, engine, target
        self._program = tuple(program)
        self.figures = Figures(service.metrics.registry)
        self.reservoir = Reservoir(self.folder, most_tokens=config.reservoir_tokens, most_days=config.reservoir_days)
        self._fingerprint = target_fingerprint(engine.target.model)
        self.reservoir.open(self._fingerprint)
        try:
            self.learnt = self._find_learnt(drafter_of(engine))
            self._go_on()
        except BaseException:
            self.reservoir.close()
            raise
        self.figures.keeps(self.reservoir)
        self._waiting: queue.SimpleQueue[Kept | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="volley-reservoir", daemon=True)
        self._process: Process | None = None
        self._is_paused = self._can_be_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        service.worker.on_finished.append(self.record)
        service.on_reloaded.append(self._reloaded)

    # -- trained drafters -------------------------------------------------------------------------------------------
    def _find_learnt(self, drafter: Drafter) -> Learnt:
        """Return the folder's state for the given ``drafter``; another drafter than before starts a new state."""
        given = drafter_fingerprint(drafter)
        mark, found = self.folder / BASE / "fingerprint", Learnt.load(self.folder)
        if not mark.exists() or mark.read_text() != given:
            source = self._engine.drafter_source
            copy = drafter if source is None else Drafter.from_pretrained(source[0])
            mark.unlink(missing_ok=True)
            copy.save_pretrained(self.folder / BASE)
            if copy.config.draft_vocab_size is not None:
                check_ends(str(self.folder / BASE), load_causal_lm(self._target, "auto"))
            write_atomically(mark, given)
        if found is None or found.base != given:
            rounds = [int(path.name) for path in (self.folder / "rounds").glob("*") if path.name.isdigit()]
            if found is not None:
                log.info("the server was given another drafter; the state of the previous one is set aside")
            found = Learnt(given, seen_round=max(rounds, default=0))
            found.save(self.folder)
        return found

    def _go_on(self) -> None:
        """Draft with the drafter that served before a restart."""
        current = self.learnt.current
        if current.folder == BASE:
            return
        given = drafter_of(self._engine)
        try:
            replace_drafter(self._engine, self._load(current.folder))
            warm_up(self._engine)
        except Exception as error:
            if self._engine.drafter is not given:
                replace_drafter(self._engine, given)
            log.error(
                "the drafter that was learnt cannot be used; the given one serves",
                extra={"fields": {"reason": str(error)}},
            )
            self.learnt = replace(self.learnt, current=Standing(), previous=None)
            self.learnt.save(self.folder)

    @property
    def _weights(self) -> WantedDraftWeights:
        return "bf16" if self._engine.drafter_source is None else self._engine.drafter_source[1]

    def _load(self, folder: str) -> Drafter:
        return load_drafter(
            self.folder / folder, self._engine.target, self._weights, compiled=self._engine.config.compile
        )

    def _reloaded(self, drafter: Drafter) -> None:
        """Restart recalibration after the operator replaced the given drafter."""
        self._reloading = asyncio.create_task(self._begin_anew(drafter))

    async def _begin_anew(self, drafter: Drafter) -> None:
        """Train from ``drafter`` on, unless it cannot be trained or the disk refuses a copy."""
        async with self._changing:
            if self._engine.drafter is not drafter:  # a candidate replaced it meanwhile
                await asyncio.wrap_future(self._service.worker.swap(drafter))
            try:
                check_drafter(drafter)
                learnt = await asyncio.to_thread(self._find_learnt, drafter)
            except Exception as error:
                self.figures.failed.inc()
                log.error("the new drafter serves as it is", extra={"fields": {"reason": str(error)}})
                await self._end_training()
                return
            self.learnt = replace(learnt, current=Standing(), previous=None)
            await self._save()
            if self._following is None or self._following.done():
                self._following = asyncio.create_task(self._follow())

    # -- keeping, in the engine's thread and in the writer's ---------------------------------------------------------
    def record(self, job: Job, request: Request) -> None:
        """Queue an answer for the disk if its client and the server allow keeping it."""
        is_asked = self.config.recalibrate_requests == "asked"
        if not (job.may_be_kept if is_asked else job.may_be_kept is not False):
            return
        if request.stats.canvases or request.num_output < 2:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self.figures.dropped.inc()
            return
        ids, at = request.token_ids, request.num_prompt
        self._waiting.put((job.client, ids[:at], ids[at:], request.params.temperature))

    def _write(self) -> None:
        is_failing = False
        while (kept := self._next_kept()) is not None:
            try:
                if kept:
                    self.reservoir.add(*kept)
                else:
                    self.reservoir.clean()
                is_failing = False
            except (ConfigError, OSError) as error:
                self.figures.dropped.inc()
                if not is_failing:
                    log.error("answers cannot be kept; serving goes on", extra={"fields": {"reason": str(error)}})
                is_failing = True
            self.figures.keeps(self.reservoir)

    def _next_kept(self) -> Kept | tuple[()] | None:
        """Return the next answer to write; an empty tuple after an hour without answers, ``None`` at the end."""
        try:
            return self._waiting.get(timeout=CLEANING_SECONDS)
        except queue.Empty:
            return ()

    # -- the training process, in the event loop -------------------------------------------------------------------------
    async def start(self) -> None:
        self._service.worker.on_held.append(self._held)
        self._writer.start()
        log.info("recalibrating", extra={"fields": {"requests": self.config.recalibrate_requests}})
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop the tasks and kill the process, which resumes its work at the next start."""
        if self._timer is not None:
            self._timer.cancel()
        await _ended(self._reloading)
        await self._end_training()
        self._waiting.put(None)
        await asyncio.to_thread(self._writer.join)
        self.reservoir.close()

    async def _end_training(self) -> None:
        await _ended(self._following)
        await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _follow(self) -> None:
        """Keep a training process running and handle its events."""
        wait = RESTART_SECONDS[0]
        while True:
            fields: dict[str, Any] = {"log": str(self.folder / "training.log")}
            try:
                self._process = process = await self._spawn()
                assert process.stdout is not None
                async for line in process.stdout:
                    event = json.loads(line)
                    if not self._can_be_paused:
                        self._can_be_paused = True
                        self._held()
                    if event["event"] == "refused":
                        log.error("nothing is trained; serving goes on", extra={"fields": {"reason": event["reason"]}})
                        self.figures.failed.inc()
                        return await self._kill()
                    if "round" in event:
                        wait = RESTART_SECONDS[0]
                        await self._act(event)
                fields["code"] = await process.wait()
            except Exception as error:  # it could not be started, or its output is not readable
                await self._kill()
                fields["reason"] = str(error)
            fields["again_in_seconds"] = wait
            log.error("the training process has ended; serving goes on", extra={"fields": fields})
            self.figures.failed.inc()
            await asyncio.sleep(wait)
            wait = min(2 * wait, RESTART_SECONDS[1])

    async def _spawn(self) -> Process:
        target = self._engine.target
        spec = {
            "folder": str(self.folder),
            "target": self._target,
            "fingerprint": self._fingerprint,
            "config": {**asdict(self.config), "recalibrate": None},
            "width": target.hidden_size,
            "device": str(target.device),
            "parent": os.getpid(),
        }
        command = [*self._program, json.dumps(spec)]
        with (self.folder / "training.log").open("wb") as errors:
            self._is_paused = self._can_be_paused = False
            return await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=PIPE, stderr=errors, start_new_session=True, limit=2**20
            )

    def _held(self, _: int = 0) -> None:
        """Pause the process while the server has requests, and for a while after."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._service.worker.held:
            self._signal(paused=True)
        elif self._is_paused:
            self._timer = self._service.worker.loop.call_later(self.config.recalibrate_idle, self._resume)

    def _resume(self) -> None:
        self._signal(paused=False)

    def _signal(self, *, paused: bool) -> None:
        """Pause or resume the process, but not before its first line: until it knows its parent, a paused process would
        outlive a killed server."""
        process = self._process
        if paused == self._is_paused or not self._can_be_paused or process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP if paused else signal.SIGCONT)
        self._is_paused = paused
        self.figures.training.set(not paused)

    # -- swapping ------------------------------------------------------------------------------------------------------
    async def _act(self, event: dict[str, Any]) -> None:
        async with self._changing:
            if event["event"] == "failed":
                self.figures.failed.inc()
                log.error("a candidate could not be made", extra={"fields": {"reason": event["reason"]}})
            elif "kind" in event and self._is_of_today(event):
                await self._judged(event)
            self.learnt = replace(self.learnt, seen_round=max(self.learnt.seen_round, int(event["round"])))
            await self._save()

    async def _save(self) -> None:
        """Save which drafter serves. If the disk is full, the server continues and a restart uses the last saved state."""
        try:
            await asyncio.to_thread(self.learnt.save, self.folder)
        except (ConfigError, OSError) as error:
            self.figures.failed.inc()
            log.error(
                "what serves cannot be noted; a restart may not know it", extra={"fields": {"reason": str(error)}}
            )

    async def _judged(self, event: dict[str, Any]) -> None:
        fields = {key: event[key] for key in ("round", "kind", "gain", "error", "tau", "tau_before", "rows", "reason")}
        if self.learnt.current.tau is None:
            self.learnt = replace(self.learnt, current=replace(self.learnt.current, tau=event["tau_before"]))
        is_swapped = event["swap"] and await self._swap(event)
        self.figures.judged(event, self.learnt.current.tau, is_swapped=is_swapped)
        log.info("a drafter took over" if is_swapped else "a candidate was judged", extra={"fields": fields})

    def _is_of_today(self, event: dict[str, Any]) -> bool:
        """Return whether a verdict is about the drafter that serves; an operator's reload may have replaced it."""
        return (event["base"], event["before"]) == (self.learnt.base, self.learnt.current.folder)

    async def _swap(self, event: dict[str, Any]) -> bool:
        chosen = Standing(event["folder"], event["kind"], event["trained_until"], event["tau"])
        try:
            drafter = await asyncio.to_thread(self._load, chosen.folder)
            await asyncio.wrap_future(self._service.worker.swap(drafter))
        except Exception as error:  # the old drafter still serves
            log.error("a candidate was refused; the old drafter stays", extra={"fields": {"reason": str(error)}})
            self.figures.failed.inc()
            return False
        self.learnt = self.learnt.swapped(chosen, int(event["round"]))
        await self._save()
        self._service.metrics.holds(memory_of(self._engine.core))
        return True


def attach(service: Service, engine: Engine, config: RecalibrateConfig, target: str | None) -> None:
    """Attach recalibration to ``service``. ``target`` is the path of the engine's target, by default the bundled one."""
    service.background_tasks.append(Recalibrator(service, engine, config, target or str(REFERENCE / "target")))


def _check(service: Service, engine: Engine, target: str) -> None:
    """Refuse a service that cannot be recalibrated, with the remedy."""
    drafter = engine.drafter
    if drafter is None:
        raise ConfigError("there is no drafter to recalibrate; name one with --drafter, or leave --recalibrate out")
    if isinstance(engine.target, ShardedTarget):
        raise ConfigError(
            "recalibration trains with a target in one process; leave out --recalibrate or --tensor-parallel"
        )
    _check_memory(engine, drafter)
    if Path(target).suffix == ".gguf":
        raise ConfigError(f"{target} cannot be trained for; give --target the folder that it was converted from")
    check_drafter(drafter)


def _check_memory(engine: Engine, drafter: Drafter) -> None:
    """Refuse a GPU without memory for training beside the server: a second target, weights, optimizer moments and gradients."""
    free = find_device(engine.target.device).free_bytes
    needed = weight_bytes(engine.target.model) + 16 * sum(w.numel() for w in drafter.parameters()) + TRAINING_BYTES
    if free is not None and free < needed:
        raise ConfigError(
            f"training needs some {needed / 2**30:.0f} GiB of the GPU beside the server, which leaves {free / 2**30:.0f}; "
            "say with --kv-mib how much the server's K/V may take, or leave --recalibrate out"
        )


def check_drafter(drafter: Drafter) -> None:
    """Refuse a drafter that cannot be trained, with the remedy."""
    if drafter.config.own_embedding or not drafter.config.is_trained_here:
        raise ConfigError(
            "volley does not train drafters of this kind (an embedding or a sequential head of its own); name the one "
            "that it was exported from, or leave --recalibrate out"
        )


async def _ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def drafter_of(engine: Engine) -> Drafter:
    assert engine.drafter is not None, "it was checked at the start"
    return engine.drafter
