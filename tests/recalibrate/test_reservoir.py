"""The store of served answers: bounded by size, age and client, whole after a kill, erased on command."""

import os
import resource
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.forks import Forked
from tests.serve.running import wait_until
from volley.cli import app
from volley.errors import ConfigError
from volley.recalibrate.reservoir import Entry, Reservoir, entries, erase, read

OPENED: list[Reservoir] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def opened(folder: Path, **options: Any) -> Reservoir:
    reservoir = Reservoir(folder, **options)
    reservoir.open("target")
    OPENED.append(reservoir)
    return reservoir


def test_a_row_comes_back_as_it_was_and_a_restart_finds_it(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.add("key", [1, 2, 3], [4, 5], 0.7)
    first.close()
    again = opened(tmp_path)
    assert (len(again), again.tokens) == (1, 5)
    assert again.add("key", [6], [7, 8], 0.0).number == 1
    one, two = read(tmp_path, entries(tmp_path))
    assert (one.prompt, one.response, one.temperature) == ([1, 2, 3], [4, 5], 0.7)
    assert (two.prompt, two.response, two.entry.number) == ([6], [7, 8], 1)
    for _ in range(2):  # what was learnt knows its answers by their numbers, so none comes twice
        again.close()
        assert erase(tmp_path) == len(again)
        again = opened(tmp_path)
    assert again.add("key", [6], [7, 8], 0.0).number == 2


def test_no_name_and_no_log_says_who_asked_or_what(tmp_path: Path) -> None:
    opened(tmp_path).add("secret-key", [11, 12], [13, 14], 0.0)
    (name,) = os.listdir(tmp_path / "rows")
    assert "secret" not in name
    assert Entry.of(name) is not None
    assert Entry.of("1.2.3.json") is Entry.of(".1.2.c.3.train.json") is None
    assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    opened(shared)
    modes = [path.stat().st_mode & 0o777 for path in (shared, shared / "rows", shared / "rounds")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_folder_of_somebody_else_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(ConfigError, match="give a folder of the user who runs the server"):
        Reservoir(tmp_path / "theirs").open("target")
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ConfigError, match="run this as the user who runs the server"):
        erase(tmp_path)


def test_a_name_tells_the_answers_tokens_and_older_names_are_read(tmp_path: Path) -> None:
    entry = opened(tmp_path).add("a", [1, 2, 3], [4, 5], 0.0)
    assert (entry.tokens, entry.answer_tokens) == (5, 2)
    old = Entry.of("000000000007.1000.abcdef.50.held.json")
    assert old == Entry(7, 1000, "abcdef", 50, True)
    assert (old.name, old.answer_tokens) == ("000000000007.1000.abcdef.50.held.json", 50)


def test_size_is_bounded_and_whoever_has_most_gives_up_his_oldest(tmp_path: Path) -> None:
    reservoir = opened(tmp_path, most_tokens=200)
    for index in range(3):
        reservoir.add("quiet", [1, index], list(range(8)), 0.0)
    for index in range(200):
        reservoir.add("flood", [2, index], list(range(8)), 0.0)
    found = entries(tmp_path)
    assert sum(entry.tokens for entry in found) <= 200
    assert [entry.number for entry in found][:3] == [0, 1, 2], "a flood displaces itself"
    assert found[-1].number == 202


def test_age_is_bounded(tmp_path: Path) -> None:
    now = [1_000_000.0]
    reservoir = opened(tmp_path, most_days=1, clock=lambda: now[0])
    reservoir.add("a", [1], [2, 3], 0.0)
    now[0] += 86_000
    reservoir.add("a", [2], [2, 3], 0.0)
    now[0] += 1_000
    reservoir.add("a", [3], [2, 3], 0.0)
    assert [entry.number for entry in entries(tmp_path)] == [1, 2]
    reservoir.close()
    now[0] += 86_000
    reservoir = opened(tmp_path, most_days=1, clock=lambda: now[0])
    assert [entry.number for entry in entries(tmp_path)] == [2], "also where nobody asks any more"
    now[0] += 1_000
    reservoir.clean()
    assert not entries(tmp_path)
    reservoir.clean()
    reservoir.close()
    assert opened(tmp_path).add("a", [4], [2, 3], 0.0).number == 3


def test_equal_prompts_are_on_one_side_and_a_fifth_is_held_out(tmp_path: Path) -> None:
    reservoir = opened(tmp_path)
    assert len({reservoir.add(str(client), [5, 6], [client, 1], 0.0).held_out for client in range(6)}) == 1
    held = [reservoir.add("a", [index], [1, 2], 0.0).held_out for index in range(300)]
    assert 0.12 < sum(held) / len(held) < 0.28


def test_another_target_and_a_second_server_are_refused_with_the_remedy(tmp_path: Path) -> None:
    reservoir = opened(tmp_path)
    with pytest.raises(ConfigError, match=r"another server recalibrates in .*; stop it"):
        opened(tmp_path)
    reservoir.close()
    with pytest.raises(ConfigError, match=r"another target .* volley reservoir erase .* --all") as refused:
        Reservoir(tmp_path).open("other")
    opened(tmp_path).close()
    _, _, remedy = str(refused.value).rpartition("volley ")
    assert CliRunner().invoke(app, remedy.split()).exit_code == 0
    other = Reservoir(tmp_path)
    other.open("other")
    other.close()


def test_where_nothing_was_kept_the_command_says_what_would_be(tmp_path: Path) -> None:
    opened(tmp_path)
    shown = CliRunner().invoke(app, ["reservoir", "show", str(tmp_path)])
    assert "0 answers of 0 clients" in shown.stdout
    assert "nothing was kept yet" in shown.stdout


def test_a_disk_without_space_leaves_no_torn_row(tmp_path: Path) -> None:
    """A limit of the process stands for the disk: a file cannot grow beyond it."""
    reservoir = opened(tmp_path)
    reservoir.add("a", [1], [2, 3], 0.0)
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
            reservoir.add("a", [4], list(range(1000)), 0.0)
        except ConfigError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [row.response for row in read(tmp_path, entries(tmp_path))] == [[2, 3]]
    assert len(list((tmp_path / "rows").iterdir())) == 1, "nothing half-written is left"


def test_the_command_erases_under_a_running_server(tmp_path: Path) -> None:
    reservoir = opened(tmp_path)
    for index in range(3):
        reservoir.add("a", [index], [2, 3], 0.0)
    copy = tmp_path / "rounds" / "1" / "train.jsonl"
    copy.parent.mkdir(parents=True)
    half = copy.with_name(".train.jsonl.123")  # of a training that was killed while it wrote
    for file in (copy, half):
        file.write_text("prompts")
    shown = CliRunner().invoke(app, ["reservoir", "show", str(tmp_path)])
    assert "3 answers of 1 clients, 9 tokens" in shown.stdout
    erased = CliRunner().invoke(app, ["reservoir", "erase", str(tmp_path)])
    assert "3 answers erased" in erased.stdout
    assert entries(tmp_path) == []
    assert not copy.exists()
    assert not half.exists()
    reservoir.add("a", [9], [2, 3], 0.0)
    assert (len(reservoir), reservoir.tokens) == (1, 3), "the server has noticed"
    refused = CliRunner().invoke(app, ["reservoir", "erase", str(tmp_path), "--all"])
    assert "another server recalibrates" in str(refused.exception)
    reservoir.close()
    CliRunner().invoke(app, ["reservoir", "erase", str(tmp_path), "--all"])
    with pytest.raises(ConfigError, match="is no reservoir"):
        erase(tmp_path)


def write_on(folder: Path) -> None:
    reservoir = opened(folder, most_tokens=3000)
    print("open", flush=True)
    for index in count():
        reservoir.add("a", [index], list(range(200)), 0.0)


def test_a_kill_at_any_moment_leaves_whole_rows(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    writer = Forked(write_on, folder)
    assert writer.printed.readline() == "open\n"
    wait_until(lambda: any(entry.number > 40 for entry in entries(folder)))
    writer.kill()
    found = entries(folder)
    rows = list(read(folder, found))
    assert len(rows) == len(found) > 0
    assert all(row.response == list(range(200)) for row in rows)
    again = opened(folder, most_tokens=3000)
    again.add("a", [0], list(range(200)), 0.0)
    assert again.tokens <= 3000


def test_what_was_kept_while_the_clock_was_wrong_does_not_stay_or_hide_what_is_old(tmp_path: Path) -> None:
    now = [5_000_000.0]
    reservoir = opened(tmp_path, most_days=1, clock=lambda: now[0])
    reservoir.add("a", [1], [2, 3], 0.0)
    now[0] = 1_000_000.0
    reservoir.add("a", [2], [2, 3], 0.0)
    assert [entry.number for entry in entries(tmp_path)] == [1]
    now[0] += 3_600
    reservoir.add("a", [3], [2, 3], 0.0)
    now[0] -= 3_600  # an hour is the change of a clock, and loses nothing
    reservoir.clean()
    assert [entry.number for entry in entries(tmp_path)] == [1, 2]


def test_what_was_being_written_when_a_server_was_killed_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "rows" / ".000000000000.1.a.3.train.json.77").write_text("[1, 2")
    opened(tmp_path)
    assert not list((tmp_path / "rows").iterdir())
