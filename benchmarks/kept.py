"""Measurements of a script so far, in a file that is whole at any moment: a stopped script goes on where it was."""

import json
import sys
from pathlib import Path
from typing import Any

from volley.files import make_folder, read_json, write_atomically


class Kept:
    """Rows of one measurement. Those of another one, with other settings, are refused."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        """``settings`` are what all rows share. Ends the script if ``file`` has others."""
        make_folder(file.parent)
        self.file, self.settings = file, json.loads(json.dumps(settings))
        self.rows: list[dict[str, Any]] = []
        if not file.exists():
            return
        held = read_json(file)
        if held["settings"] != self.settings:
            changed = [name for name in settings if held["settings"].get(name) != self.settings[name]]
            raise SystemExit(f"{file} was measured with another {', '.join(changed)}; remove it, or give another --out")
        self.rows = held["rows"]
        print(f"going on behind {len(self.rows)} rows of {file}", file=sys.stderr)

    def add(self, **row: Any) -> None:
        """One more row. It is safe when this returns."""
        self.rows.append(json.loads(json.dumps(row)))
        write_atomically(self.file, json.dumps({"settings": self.settings, "rows": self.rows}, indent=1) + "\n")
