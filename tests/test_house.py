"""The arrows between the rooms, and the one glossary of axis names."""

import ast
import re
from pathlib import Path

import pytest

from probes import AXES

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for room in ("tasks", "probes", "interp") for path in (ROOT / room).rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_run_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    forbidden = {"tasks": {"probes", "interp"}, "probes": {"tasks", "interp"}, "interp": set()}[room]
    found = set(imports(path))
    assert not {name for name in found if name.split(".")[0] in forbidden}
    assert "interp.cli" not in found
    assert "pickle" not in found


def test_every_axis_name_in_an_annotation_is_in_the_glossary():
    shape = re.compile(r"\b(?:Float|Float32|Float64|Int|Int64|Bool)\[(?:np\.ndarray|Tensor), \"([^\"]*)\"\]")
    used = {
        (name.lstrip("*#"), path.name)
        for path in FILES
        for axes in shape.findall(path.read_text())
        for name in axes.split()
    }
    assert used
    unknown = {(name, file) for name, file in used if name not in AXES and name not in ("...", "_")}
    assert not unknown
