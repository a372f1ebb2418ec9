"""Training process of recalibration: it has the lowest priority, ends with its server, and pauses during traffic.

:class:`~volley.recalibrate.recalibrator.Recalibrator` starts ``python -m volley.recalibrate.process SPEC`` and reads one JSON
object per line from its standard output.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
IDLE_SECONDS = 0.5
"""Seconds between two searches for work."""


def lower_priority(nice: int) -> None:
    """Lower the priority; at 19, run only if no other process needs the CPU."""
    os.nice(nice)
    if nice < 19:
        return
    with contextlib.suppress(AttributeError, OSError):  # Linux has a scheduling class for that
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def end_with(parent: int) -> None:
    """Arrange for this process to be killed with the server, even while paused."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the server ended before the call
        sys.exit(0)


def tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), file=sys.__stdout__, flush=True)


def main(spec: dict[str, Any]) -> None:
    """Work until the server ends. ``spec``: folder, target, fingerprint, config, width, device, parent."""
    sys.stdout = sys.stderr  # output of libraries is no event
    lower_priority(spec["config"]["recalibrate_nice"])
    end_with(spec["parent"])
    tell({"event": "started"})  # from now on the server may pause this process, which can no longer outlive it

    import torch
    from transformers.utils import logging

    from volley.recalibrate.options import RecalibrateConfig
    from volley.recalibrate.rounds import Recalibration
    from volley.train.features import FrozenTarget
    from volley.train.fused import keep_freed_memory
    from volley.train.presets import training_dtype

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device(spec["device"])
    target = FrozenTarget(spec["target"], training_dtype("auto", spec["width"], device), device)
    if target.fingerprint != spec["fingerprint"]:
        reason = f"the files of {spec['target']} are not those that the server runs; restart it"
        tell({"event": "refused", "reason": reason})
        return
    config = RecalibrateConfig(**{**spec["config"], "recalibrate": Path(spec["folder"])})
    rounds = Recalibration(Path(spec["folder"]), target, spec["target"], config, tell)
    tell({"event": "ready"})
    while os.getppid() == spec["parent"]:
        if not rounds.work():
            time.sleep(IDLE_SECONDS)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
