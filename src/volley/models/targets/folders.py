"""Checks of a target's folder: a config, complete weight files, and a tokenizer.

They run before anything is built, so an error names the faulty file. The hub's client checks hub names.
"""

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from volley.errors import CheckpointError, VolleyError
from volley.files import read_json, weight_files
from volley.models.checkpoints.formats import detect

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""Pattern of a hub name: the owner, mostly, and the model's name."""
_POINTER = b"version https://git-lfs"
_PICKLES = "pytorch_model*.bin"
_TOKENIZERS = ("tokenizer.*", "vocab*", "tekken.json", "*.model", "*.tiktoken")


def check_config_file(path: str | Path) -> None:
    """Refuse a file, a missing folder, or one without ``config.json``; CheckpointError says what to give instead."""
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(
            f"{path} is a file, and no GGUF file; give the folder that holds it, with config.json and the tokenizer files"
        )
    if not folder.is_dir():
        if not HUB_NAME.fullmatch(str(path)):
            raise CheckpointError(
                f"{path} is no folder here; give one with config.json, or a hub name like Qwen/Qwen3-0.6B"
            )
        return
    if (folder / "config.json").exists():
        if _is_drafter(folder):
            raise CheckpointError(
                f"{path} holds a drafter, no target; give it as the drafter, and its target as the target"
            )
        return
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} holds an adapter (adapter_config.json), no whole model; merge it into its base model "
            "(PEFT's merge_and_unload, then save_pretrained) and give the folder of that"
        )
    held = sorted(file.name for file in folder.iterdir())
    what = f"it holds {', '.join(held[:4])}{' and more' if len(held) > 4 else ''}" if held else "it is empty"
    raise CheckpointError(f"{path} has no config.json: {what}; give a folder that a model was saved or fetched to")


def _is_drafter(folder: Path) -> bool:
    try:
        detect(read_json(folder / "config.json"))
    except CheckpointError:  # another model's config, or no JSON, which transformers reports better
        return False
    return True


def file_problems(path: str | Path) -> list[str]:
    """Return the problems of a folder's weight and tokenizer files, one line each."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    problems = [] if any(folder.glob(_PICKLES)) else _weight_problems(folder)
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        problems.append(f"{path} has no tokenizer files; put the target's tokenizer files there")
    return problems


def check_files(path: str | Path) -> None:
    """Refuse a folder with the first of :func:`file_problems`."""
    for problem in file_problems(path):
        raise CheckpointError(problem)


def _weight_problems(folder: Path) -> list[str]:
    try:
        files = weight_files(folder)
    except VolleyError as error:
        return [str(error)]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        return [
            f"{folder} lacks {', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''}; fetch the checkpoint again"
        ]
    return [problem for problem in map(_damage, files) if problem]


def _damage(file: Path) -> str | None:
    """Return the problem of a safetensors file, if any; opening it checks its length against its header."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                return f"{file} is a pointer of Git LFS, not the weights; fetch them with git lfs pull"
        with safe_open(file, framework="pt"):
            return None
    except (SafetensorError, OSError) as error:
        return f"{file} is truncated or damaged ({error}); fetch it again"
