"""Commands that the documentation prints: each exists, and so do its options. Links between pages lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from volley.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = getattr(typer.main.get_command(app), "commands")  # noqa: B009
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")


def printed_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Names of commands and their options, from blocks of code and from code within lines; those without options are left out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(volley [^`]*)`", text)
    for line in lines:
        found = re.match(r"(?:volley|torchrun .*-m volley\.cli)\s+([a-z]+)\s(.*)", f"{line} ")
        options = re.findall(r"(?<!\S)--[a-z][a-z-]*", found[2].split(" # ")[0]) if found else []
        if found and options:
            yield found[1], options


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_printed_commands_exist_with_their_options(page: Path) -> None:
    for name, options in printed_commands(page.read_text(encoding="utf-8")):
        assert name in COMMANDS, f"volley {name}"
        known = {
            option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        commands = getattr(COMMANDS[name], "commands", {}).values()
        known |= {option for command in commands for parameter in command.params for option in parameter.opts}
        assert set(options) <= known | {"--help"}, f"volley {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), file
        if anchor:
            assert anchor in anchors(there), f"{file}#{anchor}"


def test_a_misprint_is_found() -> None:
    text = "```\nvolley bench --dataset x \\\n  --repeats 2   # --comment\n```\nand `volley nothing --at-all`"
    assert list(printed_commands(text)) == [("bench", ["--dataset", "--repeats"]), ("nothing", ["--at-all"])]
