"""Late imports, tested in processes of their own, because imports last."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.models.gguf import files
from tests.models.gguf.converted import random_model
from tests.tiles import needs_kernels
from volley import Engine, SamplingParams

COMPILER = ("torch._dynamo", "sympy", "torch.distributed.tensor")
HEAVY = (*COMPILER, "gguf")


@needs_kernels
def test_a_file_is_inspected_without_pytorch(tmp_path: Path) -> None:
    model = random_model("llama", intermediate_size=128, head_dim=16)
    path = files.write_model(tmp_path / "m.gguf", model, "llama", "Q8_0")
    *_, sound, imported = run(f"""
        import sys
        from volley.cli import main
        sys.argv = ["volley", "inspect", {str(path)!r}]
        try:
            main()
        finally:
            print([name for name in ("torch", "transformers") if name in sys.modules])
    """)
    assert (sound, imported) == ("  nothing is wrong with it", "[]")


def run(script: str, *, path: Path | None = None) -> list[str]:
    places = [str(path)] * (path is not None) + sys.path
    command = [sys.executable, "-c", dedent(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


@pytest.mark.slow
def test_the_command_line_decodes_without_the_compiler() -> None:
    imported, tokens = run(f"""
        import sys
        from volley import SamplingParams
        from volley.cli.models import ModelOptions, load_engine
        engine = load_engine(ModelOptions(device="cpu", dtype="float32"))
        [result] = engine.generate(["How do I use `tar`?"], SamplingParams(max_tokens=12))
        print([name for name in {HEAVY} if name in sys.modules])
        print(list(result.token_ids))
    """)
    [usual] = Engine.from_pretrained(dtype="float32").generate(["How do I use `tar`?"], SamplingParams(max_tokens=12))
    assert (imported, tokens) == ("[]", str(list(usual.token_ids)))


def test_a_command_imports_pytorch_only_to_load_an_engine() -> None:
    """Otherwise the garbage collector would run during that import."""
    assert run("""
        import sys
        from volley.cli import make_app
        make_app(("generate", "chat", "serve"))
        from volley.params import SamplingParams
        print([name for name in ("torch", "transformers", "jinja2", "rich", "fastapi") if name in sys.modules])
    """) == ["[]"]


@pytest.mark.slow
def test_generate_imports_neither_the_server_nor_the_benchmark_nor_another_model(tmp_path: Path) -> None:
    path = files.write_model(
        tmp_path / "m.gguf", random_model("llama"), "llama", "Q8_0", tokenizer=files.bpe_tokenizer()
    )
    *_, imported, frozen = run(f"""
        import gc, sys
        from volley.cli import main
        sys.argv = ["volley", "generate", {str(path)!r}, "How do I", "--max-tokens", "2", "--device", "cpu"]
        unneeded = {COMPILER} + ("volley.bench", "volley.serve", "fastapi", "jsonschema", "transformers.models.qwen3")
        try:
            main()
        finally:
            print([name for name in unneeded if name in sys.modules])
            print(gc.get_freeze_count() > 100_000)
    """)
    assert (imported, frozen) == ("[]", "True")


@pytest.mark.slow
def test_a_gguf_file_of_codes_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    """Weights that are never read stay on the meta device, where some operations import it."""
    path = files.write_model(
        tmp_path / "m.gguf", random_model("llama"), "llama", "Q8_0", tokenizer=files.bpe_tokenizer()
    )
    assert run(f"""
        import sys
        from volley.cli.models import ModelOptions, load_engine
        engine = load_engine(ModelOptions(target={str(path)!r}, device="cpu"))
        print(next(engine.generate("How do I")).stats.output_tokens > 0)
        print([name for name in {COMPILER} if name in sys.modules])
    """) == ["True", "[]"]


def test_transformers_models_know_the_classes_that_they_would_read_again() -> None:
    assert run("""
        from volley.imports import import_transformers
        import_transformers()
        from transformers import models
        from transformers.utils.import_utils import define_import_structure
        read = define_import_structure(models.__file__)
        places = {name: place for of in read.values() for place, names in of.items() for name in names}
        print(len(places) > 1000, {name: vars(models)["_class_to_module"][name] for name in places} == places)
    """) == ["True True"]


@pytest.mark.slow
def test_the_garbage_collector_waits_for_the_first_imports_alone() -> None:
    assert run("""
        import gc
        from volley.imports import quick_imports
        with quick_imports():
            import torch
            print(gc.isenabled())
        frozen = gc.get_freeze_count()
        print(gc.isenabled(), frozen > 100_000)
        own = [[] for _ in range(9)]
        with quick_imports():
            print(gc.isenabled())
        print(gc.get_freeze_count() <= frozen)
    """) == ["False", "True True", "True", "True"]


@pytest.mark.slow
def test_who_wants_the_compiler_later_gets_it() -> None:
    assert run("""
        from volley.imports import import_transformers
        import_transformers()
        import torch
        from transformers.masking_utils import TransformGetItemToIndex
        print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
        with TransformGetItemToIndex():
            print(torch.arange(3)[torch.tensor(1)].item())
        print(torch.distributed.is_available(), torch._dynamo.__file__.endswith("torch/_dynamo/__init__.py"))
    """) == ["[2.0, 2.0]", "1", "True True"]


@pytest.mark.slow
def test_a_transformers_that_wants_more_of_the_compiler_gets_all_of_it(tmp_path: Path) -> None:
    """A made-up package stands for a version of transformers that is not known yet."""
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    for folder in (auto, auto.parent):
        (folder / "__init__.py").touch()
    (auto / "modeling_auto.py").touch()
    (tmp_path / "transformers" / "initialization.py").touch()
    (tmp_path / "transformers" / "__init__.py").write_text(
        dedent("""
            import torch
            import torch._dynamo

            class PreTrainedModel:
                kept = torch.compiler.disable(len)
                limit = torch._dynamo.config.recompile_limit
        """)
    )
    script = """
        from volley.imports import import_transformers
        import_transformers()
        from transformers import PreTrainedModel
        print(PreTrainedModel.kept is len, PreTrainedModel.limit > 0)
    """
    assert run(script, path=tmp_path) == ["True True"]
