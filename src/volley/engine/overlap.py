"""What the host does while a GPU works on a step: the texts of the tokens of the step before, and what others add to that.

A step ends when its verdicts are read, and most kinds of steps are launched only then (the others: ``ahead.py``): positions,
slots and drafts follow from how much was accepted. Texts do not, nor does telling a client of them. On a GPU they wait until the
target's pass of the next step is launched. A CPU would only do them later, so there texts are made at once and nothing waits.
"""

from collections.abc import Callable

import torch

from volley.procedures.request import Request


class Overlap:
    def __init__(self, device: torch.device) -> None:
        self.is_used = device.type != "cpu"
        self.listeners: list[Callable[[], None]] = []
        """Called in each step once the device has its pass to do, after the texts were made; never on a CPU."""
        self._waiting: list[Request] = []

    def write(self, request: Request) -> None:
        """Make the text of the tokens that ``request`` has just taken: now if it has ended, else when there is time for it."""
        if self.is_used and request.finish_reason is None:
            self._waiting.append(request)
        else:
            request.write()

    def run(self) -> None:
        """The device is at work: do what has waited for that."""
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
