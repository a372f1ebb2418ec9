"""The page: complete in the package, nothing from outside, and alive in a real browser where there is one."""

import os
import re
from pathlib import Path

import pytest

import volley
from tests.serve.browser import BROWSER, open_page
from tests.serve.running import Running, Tiny

STATIC = Path(volley.__file__).parent / "serve" / "static"


def test_the_files_are_served(server: Running) -> None:
    page = server.client.get("/dashboard", follow_redirects=True)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name in re.findall(r'(?:src|href)="(\w[\w.]+)"', page.text):
        assert server.client.get(f"/dashboard/{name}").status_code == 200
    assert {file.name for file in STATIC.iterdir()} == {"index.html", "dashboard.css", "dashboard.js"}


def test_nothing_is_asked_of_anybody_else() -> None:
    for file in STATIC.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", file.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'self'" in (STATIC / "index.html").read_text()


def test_every_figure_it_reads_is_exported(server: Running) -> None:
    server.chat("Hello", max_tokens=8)
    exported = server.client.get("/metrics").text
    read = set(re.findall(r'"((?:num|kv|spec|decoding|generation)_\w+)"', (STATIC / "dashboard.js").read_text()))
    assert len(read) > 10
    for name in read:
        assert f" volley:{name} " in exported, "at least as a comment"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None and "CI" not in os.environ, reason="no Chromium is installed: make browser")
def test_it_lives_in_a_browser(drafting: Running, tiny: Tiny, tmp_path: Path) -> None:
    tiny.answer([{"role": "user", "content": "Hello"}], max_tokens=160)
    done = open_page(f"{drafting.url}/dashboard/#ask=Hello", tmp_path)
    page = done.stdout
    assert 'class="drafted"' in page.partition('id="answer"')[2].partition('class="legend"')[0]
    assert 'class="own"' in page.partition('id="answer"')[2].partition('class="legend"')[0]
    assert 'id="model">tiny<' in page
    assert 'class="ready"' in page
    assert int(re.findall(r'data-samples="(\d+)"', page)[0]) > 3
    assert page.count('class="bar"') > 3
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    drafting.settle()
