"""Check that no test patches a private name."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PRIVATE_NAMES_THAT_TESTS_PATCH: dict[str, str] = {}
"""``file:name`` of each, and why no seam will do."""


def patched_privately(tree: ast.Module) -> Iterator[str]:
    """Private names that a test sets in objects of others: by ``setattr``, by ``patch``, or by a plain assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if function in ("setattr", "delattr", "patch", "object"):
                names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
                yield from (name for name in map(str, names) if is_private(name.rpartition(".")[2]))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            yield from () if is_own else (node.attr,)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_test_patches_a_private_name() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()}:{name}"
        for path in TESTS.rglob("*.py")
        for name in patched_privately(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(PRIVATE_NAMES_THAT_TESTS_PATCH)


def test_a_private_patch_would_be_seen() -> None:
    for line in (
        'monkeypatch.setattr(engine, "_timings", None)',
        'monkeypatch.setattr("volley.engine.engine._is_one_prompt", None)',
        'mock.patch.object(engine, "_timings")',
        "setattr(engine, '_timings', None)",
        "engine._timings = None",
        "del engine.pool._refs",
    ):
        assert list(patched_privately(ast.parse(line))), line
    for line in ('setattr(engine, "policy", None)', "self._inner = None", "one.__doc__ = None", "_ = engine._timings"):
        assert not list(patched_privately(ast.parse(line))), line
