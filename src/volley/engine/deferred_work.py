"""Do host work while a GPU runs a step: detokenize the tokens of the step before, and call listeners.

A step ends when its verdicts are read. Most steps are launched only then (``async_launch.py`` launches the others), because
positions, slots and drafts depend on the accepted counts. Detokenizing and streaming do not depend on them. On a GPU they wait
until the target pass of the next step is launched. On a CPU waiting gains nothing, so text is made at once.
"""

from collections.abc import Callable

import torch

from volley.procedures.request import Request


class DeferredWork:
    def __init__(self, device: torch.device) -> None:
        self.is_used = device.type != "cpu"
        self.listeners: list[Callable[[], None]] = []
        """Called in each step after the GPU pass is launched and the text is made; never called on a CPU."""
        self._waiting: list[Request] = []

    def write(self, request: Request) -> None:
        """Detokenize the tokens that ``request`` has just taken: now if it has ended or runs on a CPU, otherwise in
        :meth:`run`."""
        if self.is_used and request.finish_reason is None:
            self._waiting.append(request)
        else:
            request.write()

    def run(self) -> None:
        """Do the deferred host work, now that the device is busy."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            try:
                request.write()
            except Exception as error:
                request.error = error
                raise
        if self.is_used:
            for listener in self.listeners:
                listener()
