"""A page in a real browser, where there is one."""

import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]


def open_page(address: str, profile: Path) -> "subprocess.CompletedProcess[str]":
    """Return the page after 20 seconds of its own time, and the browser's output."""
    assert BROWSER is not None, "CI has one: make browser"
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
