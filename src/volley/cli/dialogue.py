"""Command ``volley chat``: a conversation on a terminal or through pipes, with one message per line and answers on standard
output."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from volley.chat import check_template
from volley.cli.console import show
from volley.errors import ConfigError, VolleyError
from volley.params import SamplingParams
from volley.prompts import Message
from volley.results import GenerationStats

if TYPE_CHECKING:
    from volley.engine.engine import Engine

COMMANDS = {
    "/system": "/system TEXT  tell the model how to answer, from now on; without TEXT nothing any more",
    "/clear": "/clear        begin a new conversation; what /system said stays",
    "/help": "/help         show this",
    "/quit": "/quit         end, as Ctrl-D does; Ctrl-C ends an answer",
}


class Dialogue:
    """Messages of a conversation, and the engine that answers them. Its prefix cache keeps the conversation so far."""

    def __init__(
        self,
        engine: "Engine",
        params: SamplingParams,
        out: Console,
        errors: Console,
        *,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        if check_template(engine.tokenizer, thinking) is None:
            raise ConfigError(
                "the target has no chat template, so it holds no conversations; use volley generate --raw"
            )
        self._engine, self._params, self._out, self._errors = engine, params, out, errors
        self._system, self._thinking = system, thinking
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """Return all messages so far, including the system message."""
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._turns]

    def take(self, line: str) -> bool:
        """Run a command or answer a message. Return False to end the conversation."""
        name, _, rest = line.strip().partition(" ")
        if not name.startswith("/"):
            if name:
                self._answer(line)
        elif name == "/quit":
            return False
        elif name == "/clear":
            self._turns.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        elif name == "/help":
            self._print_note("\n".join(COMMANDS.values()))
        else:
            near = get_close_matches(name, list(COMMANDS), n=1)
            self._print_note(f"{name} is no command; " + (f"did you mean {near[0]}?" if near else "/help lists them"))
        return True

    def _answer(self, text: str) -> None:
        """Print an answer as it arrives. Without an answer the conversation is unchanged."""
        self._turns.append({"role": "user", "content": text})
        try:
            with _interruptible() as is_interrupted:
                answer, told = self._stream(is_interrupted)
        except (VolleyError, KeyboardInterrupt) as error:
            self._turns.pop()
            self._print_note(str(error) or "interrupted")
            return
        self._turns.append({"role": "assistant", "content": answer})
        self._print_note(told)

    def _stream(self, is_interrupted: Callable[[], bool]) -> tuple[str, str]:
        """Print the answer to the last message. Return its text and a line about it."""
        prompt = self._engine.encode(self.messages, thinking=self._thinking)
        room = self._engine.room(len(prompt), self._params)
        if room < 1 and len(self._turns) == 1:
            raise ConfigError(f"the message has {len(prompt)} tokens, more than the context holds; shorten it")
        if room < 1:
            raise ConfigError("the context is full; /clear begins a new conversation")
        text, drafted, tokens, stats = "", 0, 0, None
        chunks = self._engine.stream(prompt, self._params.within(room))
        while not is_interrupted():
            try:
                chunk = next(chunks)
            except StopIteration as end:
                stats = end.value.stats
                break
            show(self._out, chunk.text, drafted=chunk.from_draft)
            text, tokens = text + chunk.text, tokens + len(chunk.token_ids)
            drafted += chunk.from_draft * len(chunk.token_ids)
        chunks.close()
        self._out.print()
        return text, _described(stats, tokens, drafted)

    def _print_note(self, line: str) -> None:
        """Print a line that is no answer: dim on a terminal, on standard error if answers may go to a file."""
        to = self._out if self._out.is_terminal else self._errors
        to.print(Text(line, style="dim"), soft_wrap=True)


def _described(stats: GenerationStats | None, tokens: int, drafted: int) -> str:
    """Return the line below an answer; without ``stats`` it was interrupted."""
    share = f"{drafted / max(tokens, 1):.0%} drafted"
    if stats is None:
        return f"interrupted · {tokens} tokens · {share}"
    return f"{stats.decode_tokens_per_second:.1f} tokens/s · {tokens} tokens · {share}"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. The first Ctrl-C sets it between two steps; a second one
    raises as usual."""
    is_interrupted, before = False, signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def converse(dialogue: Dialogue, out: Console) -> None:
    """Process lines until the input ends; on a terminal the history is kept between conversations."""
    if not (sys.stdin.isatty() and out.is_terminal):
        for line in sys.stdin:
            if not dialogue.take(line.rstrip("\n")):
                return
        return
    ask = _terminal()
    out.print(Text("/help lists the commands, /quit or Ctrl-D ends", style="dim"))
    while True:
        try:
            line = ask()
        except EOFError:
            return
        except KeyboardInterrupt:  # discard the line being written
            continue
        if not dialogue.take(line):
            return


def _terminal() -> Callable[[], str]:
    """Return a function that reads a line with a shell's keys."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    history: History = InMemoryHistory()
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "volley" / "chat-history"
    with suppress(OSError):  # without a writable place there is no history
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        history = FileHistory(file)
    session: PromptSession[str] = PromptSession("> ", history=history)
    return session.prompt
