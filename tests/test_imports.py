"""Imports point one way, and what is heavy or optional is imported only where it is needed.

Read off the sources, so that a rule holds on paths that no test runs and for packages that are not
installed; what a base install really loads is looked at in a process of its own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("schemas", "pipeline", "jobs")
# Where a package on the registry imports under another name.
IMPORTED_AS = {"pyyaml": "yaml"}
# Imported at module level only in the two parts that run inside a training process.
TRAINING = {"ray", "tensordict", "torch", "torchdata", "transfer_queue", "transformers", "verl"}
TRAINING_PARTS = ("pipeline.capture", "pipeline.replay")


@dataclass(frozen=True)
class Import:
    """One imported name: `module` imports `name`, `at_once` where importing `module` does it."""

    module: str
    name: str
    at_once: bool
    line: int

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.name}"

    def of(self, *packages: str) -> bool:
        """Whether what is imported belongs to one of these packages."""
        return any(
            self.name == package or self.name.startswith(f"{package}.") for package in packages
        )

    def within(self, *modules: str) -> bool:
        """Whether the import stands in one of these modules of ours, or below."""
        return any(self.module == own or self.module.startswith(f"{own}.") for own in modules)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _statements(node: ast.AST, at_once: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_once
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(child, False)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            # Nothing in here runs; the rest of the statement does.
            yield from _statements(ast.Module(child.body, []), False)
            yield from _statements(ast.Module(child.orelse, []), at_once)
        else:
            yield from _statements(child, at_once)


def _imports(path: Path, source: str | None = None) -> Iterator[Import]:
    module = _name(path)
    package = f"rollsift.{module}".split(".")
    if path.name != "__init__.py":
        package.pop()
    for statement, at_once in _statements(ast.parse(source or path.read_text("utf-8")), True):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            assert isinstance(statement, ast.ImportFrom)
            up = package[: len(package) + 1 - statement.level] if statement.level else []
            base = ".".join([*up, *([statement.module] if statement.module else [])])
            # `from rollsift import jobs` imports rollsift.jobs as much as `from rollsift.jobs ...`.
            names = [f"{base}.{alias.name}" for alias in statement.names]
        for name in names:
            yield Import(module, name, at_once, statement.lineno)


def _base() -> set[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "dependencies"
    ]
    names = {re.split(r"[^A-Za-z0-9_-]", each, maxsplit=1)[0] for each in declared}
    return {IMPORTED_AS.get(name, name) for name in names}


IMPORTS = [found for folder in FOLDERS for path in _modules(folder) for found in _imports(path)]


def test_the_scan_sees_every_form_of_import() -> None:
    """Relative, aliased, nested, guarded and function-level imports are all resolved rightly."""
    source = """
import torch.nn as nn, os
from ..schemas import errors
from . import stages
from rollsift import jobs
if TYPE_CHECKING:
    import verl
else:
    import ray
class A:
    import tensordict
def f():
    from .stages import g
"""
    found = list(_imports(ROOT / "pipeline" / "some.py", source))
    assert [(each.name, each.at_once) for each in found] == [
        ("torch.nn", True),
        ("os", True),
        ("rollsift.schemas.errors", True),
        ("rollsift.pipeline.stages", True),
        ("rollsift.jobs", True),
        ("verl", False),
        ("ray", True),
        ("tensordict", True),
        ("rollsift.pipeline.stages.g", False),
    ]
    inside = _imports(ROOT / "pipeline" / "__init__.py", "from . import stages")
    assert [each.name for each in inside] == ["rollsift.pipeline.stages"]


def test_schemas_need_pyarrow_msgspec_and_the_standard_library_only() -> None:
    """The contract can be read by anyone who has pyarrow and msgspec."""
    allowed = (*sys.stdlib_module_names, "pyarrow", "msgspec", "rollsift.schemas")
    wrong = [each for each in IMPORTS if each.within("schemas") and not each.of(*allowed)]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_pipeline_never_imports_jobs() -> None:
    """The command line stands on the pipeline, never the other way round."""
    wrong = [each for each in IMPORTS if each.within("pipeline") and each.of("rollsift.jobs")]
    assert not wrong, "\n".join(map(str, wrong))


def test_our_own_modules_go_by_their_full_names() -> None:
    """A plain `pipeline`, `schemas` or `jobs` would be the caller's own folder of that name."""
    wrong = [each for each in IMPORTS if each.of(*FOLDERS)]
    assert not wrong, "\n".join(map(str, wrong))


def test_training_libraries_are_imported_at_once_only_in_capture_and_replay() -> None:
    """Filtering and inspecting need no torch: elsewhere only functions may import it."""
    wrong = [
        each
        for each in IMPORTS
        if each.at_once and each.of(*TRAINING) and not each.within(*TRAINING_PARTS)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_torch_npu_is_never_imported_at_once() -> None:
    """Without CANN, importing torch_npu breaks torch itself: only a function may ask for it."""
    wrong = [each for each in IMPORTS if each.at_once and each.of("torch_npu")]
    assert not wrong, "\n".join(map(str, wrong))


def test_a_base_install_has_all_that_is_imported_at_once() -> None:
    """Outside capture and replay, only the declared dependencies are imported at module level."""
    allowed = (*sys.stdlib_module_names, *_base(), *(f"rollsift.{folder}" for folder in FOLDERS))
    wrong = [
        each
        for each in IMPORTS
        if each.at_once and not each.within(*TRAINING_PARTS) and not each.of(*allowed)
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("module", ["rollsift.schemas", "rollsift.pipeline", "rollsift.jobs.main"])
def test_importing_a_package_loads_no_training_library(module: str) -> None:
    """Not even by way of another library does a plain import load torch, verl or Ray."""
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not (TRAINING | {"torch_npu"}) & set(done.stdout.split())


def test_the_pipeline_lists_its_modules() -> None:
    """The docstring of pipeline/__init__.py names every module there is, and no other.

    A line of its list begins with a module and two spaces or more; what a package holds is named in
    the package's line (`readers.jsonl`).
    """
    docstring = ast.get_docstring(ast.parse((ROOT / "pipeline/__init__.py").read_text("utf-8")))
    assert docstring is not None
    listed = re.findall(r"(?m)^ *([a-z_]\w*) {2,}\S", docstring)
    assert len(listed) == len(set(listed))
    within = {
        name
        for package in listed
        for name in re.findall(rf"\b{package}(?:\.[a-z_]\w*)+", docstring)
    }
    there = {_name(path).removeprefix("pipeline.") for path in _modules("pipeline")} - {"pipeline"}
    assert {*listed, *within} == there
