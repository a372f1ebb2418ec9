"""End a run after its current step on Ctrl-C or SIGTERM."""

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Interrupts:
    """Records a first Ctrl-C or SIGTERM in ``seen``; a second one ends the process.

    Only the main thread receives signals; in another thread this does nothing.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, _: Any) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
        self.say(f"{signal.Signals(number).name}: saving after this step")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
