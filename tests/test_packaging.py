"""What is shipped: wheel and source archive hold the three folders, whole, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jobs", "pipeline", "schemas")
SHIPPED = {".py", ".sql", ".typed", ".yaml"}
# All that a build reads, and what must stay out of its results.
TREE = (*FOLDERS, ".dev", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "data", "tests")
HOSTILE = 'raise ImportError("a module of the folder that the process was started in")\n'


def _build(tree: Path, out: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _sources() -> dict[str, bytes]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        f"rollsift/{path.relative_to(ROOT).as_posix()}": path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree: a build leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            # As in a clone, the links in .dev stay links.
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy(source, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree itself."""
    out = tmp_path_factory.mktemp("wheel")
    _build(tree, out, "--wheel")
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_three_folders_and_nothing_else(wheel: Path) -> None:
    """Every file of the three folders is in the wheel byte for byte, and no other but metadata."""
    packed = _contents(wheel)
    metadata = {name for name in packed if name.split("/")[0].endswith(".dist-info")}
    sources = _sources()
    assert packed.keys() - metadata == sources.keys()
    assert {name: packed[name] for name in sources} == sources


def test_the_folders_hold_only_kinds_of_files_meant_to_be_shipped() -> None:
    """A file of a new kind in the three folders (data, a cache, a note) ships only by decision."""
    odd = {name for name in _sources() if Path(name).suffix not in SHIPPED | {".md"}}
    assert odd == set()


def test_each_folder_tells_type_checkers_that_it_is_typed(wheel: Path) -> None:
    """A py.typed stands in each of the three packages, since rollsift itself has no __init__."""
    packed = _contents(wheel)
    assert {f"rollsift/{folder}/py.typed" for folder in FOLDERS} <= packed.keys()
    assert "rollsift/__init__.py" not in packed


def test_a_hostile_working_directory_shadows_nothing(wheel: Path, tmp_path: Path) -> None:
    """Modules named pipeline, jobs and schemas in the caller's folder are not what we import."""
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for folder in FOLDERS:
        (hostile / f"{folder}.py").write_text(HOSTILE)
    # The command is loaded as the console script loads it: by its entry point.
    program = """
import importlib, importlib.metadata as metadata, os, sys
assert sys.path[0] == "", "the working directory must come first, as in python -c and a notebook"
for name in ("schemas", "pipeline", "jobs"):
    print(os.path.dirname(importlib.import_module("rollsift." + name).__file__))
(distribution,) = metadata.distributions(name="rollsift", path=[sys.argv[1]])
(command,) = distribution.entry_points.select(group="console_scripts", name="rollsift")
assert callable(command.load())
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(unpacked)
    done = subprocess.run(
        [sys.executable, "-c", program, str(unpacked)],
        cwd=hostile,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [str(unpacked / "rollsift" / name) for name in ("schemas", "pipeline", "jobs")]
    assert done.stdout.splitlines() == expected


def test_the_source_archive_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    """The wheel built from the source archive equals the one built from the tree."""
    _build(tree, tmp_path, "--sdist")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    _build(unpacked, tmp_path, "--wheel")
    (again,) = tmp_path.glob("*.whl")
    assert _contents(again) == _contents(wheel)
    assert not {"data", "tests", ".dev"} & {path.name for path in unpacked.iterdir()}
