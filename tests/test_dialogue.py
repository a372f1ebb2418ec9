"""A conversation through pipes and on a pseudo-terminal: commands, the prefix that is read once, and Ctrl-C."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import TinyPair
from volley import Engine
from volley.cli.dialogue import COMMANDS, Dialogue
from volley.errors import ConfigError
from volley.params import SamplingParams
from volley.results import GenerationResult

FAST = ("--dtype", "float32", "--threads", "1")


class Room:
    """A conversation whose answers and other lines are kept apart."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.said, self.told = io.StringIO(), io.StringIO()
        out, errors = (Console(file=file, width=10_000, highlight=False) for file in (self.said, self.told))
        self.dialogue = Dialogue(engine, SamplingParams(max_tokens=24), out, errors, **options)

    def ask(self, line: str) -> tuple[str, str]:
        before = self.said.tell(), self.told.tell()
        assert self.dialogue.take(line)
        return self.said.getvalue()[before[0] :].removesuffix("\n"), self.told.getvalue()[before[1] :]


@pytest.fixture(scope="module")
def engine(tiny_pair: TinyPair) -> Engine:
    return Engine.from_pretrained(tiny_pair.target, dtype=torch.float32, page_size=4)


def test_answers_are_those_of_the_whole_conversation(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn reads only its new tokens."""
    cached = []
    result = GenerationResult

    def kept(*given: Any, **named: Any) -> GenerationResult:
        cached.append((made := result(*given, **named)).stats.cached_tokens)
        return made

    monkeypatch.setattr("volley.procedures.request.GenerationResult", kept)
    room = Room(engine)
    first, told = room.ask("Hello there, who are you?")
    assert "24 tokens" in told
    assert "% drafted" in told
    second, _ = room.ask("And again")
    chat = [
        {"role": "user", "content": "Hello there, who are you?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And again"},
    ]
    assert room.dialogue.messages == [*chat, {"role": "assistant", "content": second}]
    assert cached[0] == 0
    assert cached[1] >= 16
    (alone,) = engine.generate([chat], SamplingParams(max_tokens=24))
    assert alone.text == second


@pytest.mark.slow
def test_commands_change_the_conversation(engine: Engine) -> None:
    room = Room(engine, system="Be brief.")
    hello, _ = room.ask("Hello")
    assert room.dialogue.messages[0] == {"role": "system", "content": "Be brief."}
    room.ask("/system Be rude. ")
    assert room.dialogue.messages[0]["content"] == "Be rude."
    room.ask("/clear")
    assert [message["role"] for message in room.dialogue.messages] == ["system"]
    room.ask("/system")
    assert room.dialogue.messages == []
    assert room.ask("  ") == ("", "")
    assert room.ask("/help")[1].count("\n") == len(COMMANDS)
    assert "did you mean /clear?" in room.ask("/claer")[1]
    assert "/help lists them" in room.ask("/zzz")[1]
    assert room.dialogue.messages == []
    assert not room.dialogue.take("/quit")
    (alone,) = engine.generate([[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]])
    assert alone.text.startswith(hello)


def test_a_message_that_is_refused_leaves_the_conversation_as_it_was(tiny_pair: TinyPair) -> None:
    room = Room(Engine.from_pretrained(tiny_pair.target, dtype=torch.float32, page_size=4, num_pages=12))
    room.ask("Hi")
    before = room.dialogue.messages
    said, told = room.ask("word " * 100)
    assert not said
    assert "/clear" in told
    assert room.dialogue.messages == before


def test_a_model_without_a_template_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="volley generate --raw"):
        Room(engine)


def test_ctrl_c_ends_an_answer_and_keeps_what_was_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    room, step, steps, before = Room(engine), engine.step, 0, signal.getsignal(signal.SIGINT)

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", interrupted)
        said, told = room.ask("Hello")
    assert "interrupted" in told
    assert said
    assert room.dialogue.messages[-1] == {"role": "assistant", "content": said}
    assert engine.snapshot().running == 0
    assert "24 tokens" in room.ask("Go on")[1]
    assert signal.getsignal(signal.SIGINT) is before  # a job in the background ignores the signal


def command(pair: TinyPair, *options: str) -> list[str]:
    return [sys.executable, "-m", "volley.cli", "chat", "--target", str(pair.target), *options, *FAST]


@pytest.mark.slow
def test_a_conversation_through_pipes(tiny_pair: TinyPair, engine: Engine) -> None:
    lines = "Hello\n/system Be brief.\n\nAgain\n/quit\nnever asked\n"
    done = subprocess.run(
        command(tiny_pair, "--max-tokens", "24"), input=lines, capture_output=True, text=True, check=True
    )
    room = Room(engine)
    expected = [room.ask(line)[0] for line in ("Hello", "/system Be brief.", "Again")]
    assert done.stdout == f"{expected[0]}\n{expected[2]}\n"
    assert done.stderr.count("24 tokens") == 2


READY = "\x1b[?2004h"  # the terminal is told that text may be pasted


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execve(arguments[0], arguments, {**os.environ, "TERM": "xterm", **environment})
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Read until ``text`` is shown behind what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown!r}"
            if not select.select([self.file], [], [], 1.0)[0]:
                continue
            try:
                more = os.read(self.file, 4096).decode(errors="replace")
            except OSError:  # it ended
                more = ""
            assert more, f"{text!r} is not in {self.shown!r}"
            if "\x1b[6n" in more:  # where the cursor is
                self.write("\x1b[1;1R")
            self.shown += more
        self.shown = self.shown.partition(text)[2]

    def write(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self) -> int:
        """Its exit code."""
        while True:
            try:
                if not os.read(self.file, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_a_conversation_on_a_terminal(tiny_pair: TinyPair, tmp_path: Path) -> None:
    # With this seed the answer has 900 tokens; at temperature 1 there is nothing to copy.
    long = command(tiny_pair, "--max-tokens", "900", "--temperature", "1", "--seed", "3")
    terminal = Terminal(long, XDG_STATE_HOME=str(tmp_path))
    terminal.wait_for("/help lists the commands")
    terminal.wait_for(READY)
    terminal.write("/help\r")
    terminal.wait_for(COMMANDS["/quit"])
    terminal.wait_for(READY)
    terminal.write("Hello\r")
    terminal.wait_for("\x1b[?2004l")
    time.sleep(0.1)
    terminal.write("\x03")
    terminal.wait_for("interrupted")
    terminal.wait_for(READY)
    terminal.write("half a line\x03")
    terminal.wait_for(READY)
    terminal.write("\x1b[A\x1b[A\r")  # the history: Hello, /help
    terminal.wait_for(COMMANDS["/quit"])
    terminal.wait_for(READY)
    terminal.write("\x04")
    assert terminal.end() == 0
    history = tmp_path / "volley" / "chat-history"
    assert [line for line in history.read_text().splitlines() if line.startswith("+")] == ["+/help", "+Hello", "+/help"]
    assert history.stat().st_mode & 0o077 == 0
