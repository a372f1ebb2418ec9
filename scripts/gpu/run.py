"""Everything that can only be known on a GPU, in parts of at most nine minutes each, resumable.

    scripts/gpu/run OUT                  all parts that OUT does not have yet or that did not pass, one process each
    scripts/gpu/run OUT --part copy      one part, again
    scripts/gpu/run OUT --dry-run        the parts on a CPU, with tiny shapes: whether the script itself works

Each part writes ``OUT/PART.json`` when it is done, and ``OUT/tables.md`` is made of all that are there. Nothing is fetched:
weights are random in Qwen3-8B's shape, and the bundled pair. Ends with status 1 if a part failed or did not pass.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu.parts import LEVELS, PARTS, SEARCHED, SECONDS, Bench
from volley.files import write_atomically

NOT_PASSED, TIMED_OUT = 3, 124


def tables(out: Path) -> str:
    """Return the findings of the parts as Markdown."""
    lines = ["# On a GPU", ""]
    for name, part in PARTS.items():
        file = out / f"{name}.json"
        if not file.exists():
            lines += [f"## {name}", "", "not run", ""]
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## {name}", "", str(part.__doc__).split("\n")[0], ""]
        table = found.pop("table", None)
        lines += [f"- {key}: {value}" for key, value in found.items()] + [""]
        if isinstance(table, list):
            lines += ["| " + " | ".join(table[0]) + " |", "|---" * len(table[0]) + "|"]
            lines += ["| " + " | ".join(_shown(value) for value in row.values()) + " |" for row in table] + [""]
        elif table:
            lines += ["```", table, "```", ""]
    return "\n".join(lines)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def has_passed(file: Path) -> bool:
    """Return whether a part is done, and its checks passed."""
    return file.exists() and json.loads(file.read_text(encoding="utf-8")).get("passed", True)


def run_part(name: str, out: Path, levels: list[int], *, dry: bool) -> bool:
    """One part, in this process; whether it passed."""
    bench = Bench(dry, levels)
    started = time.time()
    found = PARTS[name](bench)
    facts = {"device": str(bench.device), "torch": bench.torch.__version__}
    if not dry:
        facts["device"] = bench.torch.cuda.get_device_name()
    report = {**found, **facts, "seconds": round(time.time() - started, 1)}
    write_atomically(out / f"{name}.json", json.dumps(report, indent=1) + "\n")
    if verdict := found.get("verdict"):
        print(f"{name}: {verdict}", flush=True)
    return found.get("passed", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--part", choices=PARTS, help="only this one, in this process")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="numbers of requests at once")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        passed = run_part(options.part, options.out, options.levels, dry=options.dry_run)
        return 0 if passed else NOT_PASSED
    failed = []
    for name in PARTS:
        if has_passed(options.out / f"{name}.json"):
            continue
        command = [sys.executable, __file__, str(options.out), "--part", name, *["--dry-run"] * options.dry_run]
        command += ["--levels", *map(str, options.levels)]
        env = {**os.environ, "PYTHONPATH": SEARCHED}
        try:
            status = subprocess.run(command, env=env, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        said = {0: "done", NOT_PASSED: "did not pass", TIMED_OUT: f"stopped after {SECONDS} s"}
        print(f"{name}: {said.get(status, f'failed with status {status}')}", flush=True)
        failed += [name] * (status != 0)
        write_atomically(options.out / "tables.md", tables(options.out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
