"""A copy of a target whose rotary embedding reaches further (YaRN), untrained: for answers and contexts beyond its own.

    python benchmarks/stretch.py --factor 2 --out runs/stretched
    volley bench --target runs/stretched --drafter reference --max-tokens 2048 --ignore-eos --data-dir DIR

It writes other text than the target. What is compared on it is decoding, not answers.
"""

import argparse
import json
import shutil
from pathlib import Path

from volley.files import REFERENCE, read_json, write_atomically


def stretch(folder: Path, factor: float, copy: Path) -> Path:
    """Write ``copy`` of the target in ``folder``, which reaches ``factor`` times as far."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = read_json(folder / "config.json")
    trained = config["max_position_embeddings"]
    config["max_position_embeddings"] = int(factor * trained)
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    write_atomically(copy / "config.json", json.dumps(config, indent=2) + "\n")
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=REFERENCE / "target")
    parser.add_argument("--factor", type=float, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(stretch(options.target, options.factor, options.out))


if __name__ == "__main__":
    main()
