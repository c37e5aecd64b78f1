"""A run folder that somebody or something has been at: moved clocks, links, names that lead out of
it, manifests that are not ours; and no code is ever made of data."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml

from rollsift.jobs.main import main
from rollsift.pipeline import recipes, verify
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import CheckError, RollsiftError

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("crash", Path(__file__).with_name("crash.py"))
assert SPEC
assert SPEC.loader
crash = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(crash)
log, sift, tree, whole = crash.log, crash.sift, crash.tree, crash.whole
M2 = "manifests/000002.v1.json"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A log of two steps."""
    for step in (1, 2):
        log(tmp_path / "logs", step)
    return tmp_path / "logs"


# --- clocks


def test_no_clock_decides_anything(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock and the times of files say, equal logs are unchanged and give equal bytes;
    another content of equal size and time is seen."""
    out = tmp_path / "run"
    sift(logs, out)
    expected = tree(out)
    files = [path for path in (*logs.iterdir(), *out.rglob("*")) if path.is_file()]
    for now in (0, 2**32, 10**9):
        for number, path in enumerate(files):
            os.utime(path, (now, now + number))
        assert sift(logs, out).unchanged == [1, 2]
        assert tree(out) == expected
    before = (logs / "1.jsonl").stat()
    log(logs, 1, seed=1)
    os.utime(logs / "1.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (logs / "1.jsonl").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    outcome = sift(logs, out)
    assert (outcome.unchanged, outcome.replaced) == ([], [1, 2])
    log(logs, 1)
    for years in (-10, 10):
        for name in ("time", "time_ns"):
            clock, shift = getattr(time, name), years * 365 * 86400
            shift *= 10**9 if name == "time_ns" else 1
            monkeypatch.setattr(time, name, lambda clock=clock, shift=shift: clock() + shift)
        sift(logs, tmp_path / f"{years}")
        assert tree(tmp_path / f"{years}") == expected


# --- links and names


def test_logs_and_runs_behind_links(tmp_path: Path, logs: Path) -> None:
    """Logs and run folders that are named through links are those that the links point to."""
    sift(logs, tmp_path / "run")
    ids = whole(tmp_path / "run")
    (tmp_path / "links").mkdir()
    for path in logs.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    (tmp_path / "folder").symlink_to(logs)
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    for number, named in enumerate(("links", "folder", "logs/../logs")):
        sift(tmp_path / named, tmp_path / f"{number}")
        assert whole(tmp_path / f"{number}") == ids
    for _ in range(2):
        sift(logs, tmp_path / "out")
        assert tree(tmp_path / "real") == tree(tmp_path / "run")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(RollsiftError, match="nowhere"):
        sift(logs, tmp_path / "nowhere")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "name",
    ["manifests", "rollouts", "groups", "bad_records", ".staging", ".lock", "run.json",
     "manifests/000003.v1.json", "rollouts/000003.v1.parquet", "groups/000003.v1.parquet"],
)  # fmt: skip
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(
    tmp_path: Path, logs: Path, name: str, there: bool
) -> None:
    """A link that was planted in a run folder is refused by name or removed; what it points to is
    left as it was."""
    out, outside = tmp_path / "run", tmp_path / "outside"
    sift(logs, out)
    place, kept = out / name, (out / M2).read_bytes()
    if place.exists():
        place.rename(tmp_path / "moved")
    if there:
        outside.mkdir()
        (outside / "file").write_bytes(kept)
    target = outside if "." not in name or name == ".staging" else outside / "file"
    place.symlink_to(target)
    log(logs, 3)
    try:
        sift(logs, out)
    except RollsiftError as error:
        assert str(place) in str(error)  # noqa: PT017  # not each place must raise
        assert "a symbolic link" in str(error) or "manifests/" in name  # noqa: PT017  # not each place must raise
        assert 3 not in Run(out).versions() or "manifests" in name
    else:
        # What a link gives to read is another manifest of step 3, which then gets a version more.
        assert place.is_symlink() == name.startswith("manifests/")
        assert "/" in name
        assert 3 in whole(out)
    assert tree(outside) == ({"file": kept} if there else {})
    assert outside.exists() == there


def reseal(out: Path, change: Callable[[Any], None], name: str = M2) -> None:
    """Change a manifest and give it the id that it then has."""
    data = json.loads((out / name).read_bytes())
    change(data["manifest"])
    value = json.dumps(data["manifest"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data["id"] = hashlib.sha256(value.encode()).hexdigest()
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (out / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    "file", ["../secret/2.parquet", "{}/secret/2.parquet", "x/../../secret/2.parquet"]
)
def test_no_manifest_leads_outside_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A manifest whose source lies outside of the log root is refused by whoever would read it,
    however well it is made; the file is not read."""
    out, logs = tmp_path / "run", tmp_path / "logs"
    for folder in (logs, tmp_path / "secret"):
        folder.mkdir()
        for step in (1, 2):
            rows = {
                "uid": ["a", "b"],
                "step": [step] * 2,
                "score": [1.0, 0.0],
                "output": [folder.name] * 2,
            }
            pl.DataFrame(rows).write_parquet(folder / f"{step}.parquet")
    (logs / "x").mkdir()
    sift(logs, out)
    asked = "SELECT response FROM rollouts WHERE step = 2"
    assert query(Run(out), asked).fetchall() == [("logs",)] * 2
    reseal(out, lambda m: m["sources"][0].update(file=file.format(tmp_path)))
    assert Run(out).steps()  # it is as a manifest should be
    opened: list[str] = []
    for module in (pq, pl):
        for name in ("ParquetFile", "read_parquet"):
            original = getattr(module, name, None)

            def spy(path: Any, *args: Any, original: Any = original, **options: Any) -> Any:
                opened.append(str(path))
                return original(path, *args, **options)

            monkeypatch.setattr(module, name, spy, raising=False)
    with pytest.raises(CheckError, match=r"its log .* is outside"):
        query(Run(out), asked)
    (logs / "2.parquet").rename(tmp_path / "2.parquet")
    with pytest.raises(CheckError, match=r"its log .* is outside"):
        sift(logs, out)
    found = verify.verify(Run(out)).findings
    assert any("outside the log root" in finding.expected for finding in found)
    assert not [path for path in opened if "secret" in path]
    assert opened


# --- manifests that are not ours


def sealed(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """A change of what a manifest says, with its id."""
    return lambda file: reseal(file.parents[1], change)


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A change of a manifest's bytes."""
    return lambda file: (file.write_bytes(change(file.read_bytes())), None)[1]


OTHER = "Read it with the version that wrote it, or filter into a new folder"
RESTORE = "restore it, or filter into another folder"
STRANGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "an older format": (sealed(lambda m: m.update(format=0)), OTHER),
    "a newer format": (sealed(lambda m: m.update(format=2, new=1)), OTHER),
    "a format that is no number": (sealed(lambda m: m.update(format="1")), OTHER),
    "no format": (sealed(lambda m: m.pop("format") and None), OTHER),
    "truncated": (raw(lambda data: data[:-200]), RESTORE),
    "without its last byte": (raw(lambda data: data[:-1]), RESTORE),
    "an unknown key": (sealed(lambda m: m.update(surprise=1)), RESTORE),
    "an unknown inner key": (sealed(lambda m: m["counts"].update(surprise=1)), RESTORE),
    "a missing key": (sealed(lambda m: m.pop("offsets") and None), RESTORE),
    "another type": (sealed(lambda m: m.update(row="0")), RESTORE),
    "no source": (sealed(lambda m: m.update(sources=[])), RESTORE),
    "a duplicate key": (raw(lambda d: d.replace(b'"step":2', b'"step":2,"step":2')), RESTORE),
    "a duplicate id": (raw(lambda d: b'{"id":"",' + d[1:]), RESTORE),
    "blanks": (raw(lambda d: d.replace(b",", b", ")), RESTORE),
    "another value": (raw(lambda d: d.replace(b'"seen":', b'"seen":1')), RESTORE),
    "no JSON": (raw(lambda d: b"\xff" + d), RESTORE),
    "a list": (raw(lambda d: b"[" + d + b"]"), RESTORE),
    "too deep": (raw(lambda d: b'{"id":' + b"[" * 10**5), RESTORE),
    "too deep inside": (raw(lambda d: b'{"id":"","manifest":' + b"[" * 10**5), RESTORE),
    "a lone surrogate": (raw(lambda d: d.replace(b'"chars"', b'"\\ud800"')), RESTORE),
    "empty": (raw(lambda d: b""), RESTORE),
    "zeros": (raw(lambda d: bytes(len(d))), RESTORE),
}  # fmt: skip
COMMANDS = {
    "sql": ["sql", "run", "SELECT count(*) FROM rollouts"],
    "stats": ["stats", "run"],
    "filter": crash.command("logs", "run"),
}


def told(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int | str | None, str]:
    """-> the exit status of a command and what it says on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("what", STRANGE)
def test_strange_manifests_are_refused_by_name(
    tmp_path: Path, logs: Path, what: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A manifest that this version cannot read is exit status 4 with the file's name and what to
    do, whoever reads it, and stays as it is; filter makes empty ones again."""
    change, words = STRANGE[what]
    monkeypatch.chdir(tmp_path)
    sift(logs, Path("run"))
    expected = tree(Path("run"))
    change(Path("run") / M2)
    left = tree(Path("run"))
    assert left != expected
    for name, arguments in COMMANDS.items():
        status, said = told(capsys, arguments)
        if name == "filter" and what in ("empty", "zeros"):
            assert (status, tree(Path("run"))) == (0, expected)
            continue
        assert (status, f"rollsift: run/{M2}: " in said, words in said) == (4, True, True), said
        assert tree(Path("run")) == left


def test_a_strange_run_json_is_refused_by_name(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run.json that this version cannot read is exit status 4 with its name and what to do."""
    monkeypatch.chdir(tmp_path)
    sift(logs, Path("run"))
    file = Path("run/run.json")
    value = json.loads(file.read_bytes())
    for text, words in {
        "": RESTORE,
        json.dumps(value)[:-9]: RESTORE,
        json.dumps(value | {"surprise": 1}): RESTORE,
        json.dumps({key: value[key] for key in value if key != "recipe"}): RESTORE,
        "[" * 10**5: RESTORE,
        json.dumps(value | {"format": 0}): OTHER,
        json.dumps(value | {"format": 2}): OTHER,
    }.items():
        file.write_text(text)
        for arguments in COMMANDS.values():
            status, said = told(capsys, arguments)
            assert (status, "rollsift: run/run.json: " in said, words in said) == (4, True, True), (
                said
            )
        assert file.read_text() == text


# --- code


CODE = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {"unsafe_load", "unsafe_load_all", "full_load", "read_pickle", "UnsafeLoader", "FullLoader"}
OF_MODULES = {
    "yaml.load",
    "yaml.load_all",
    "torch.load",
    "np.load",
    "numpy.load",
    "joblib.load",
    "pl.deserialize",
}


def code_from_data(source: str) -> list[str]:
    """What in a module could make code of data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in CODE]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}"] * ((node.module or "").split(".")[0] in CODE)
            found += [each.name for each in node.names if each.name in LOADS]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] * (node.func.id in CALLS)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            dangerous = node.attr in LOADS or name in OF_MODULES or node.attr == "exec_module"
            found += [name] * dangerous
        elif isinstance(node, ast.keyword):
            found += ["allow_pickle"] * (node.arg == "allow_pickle")
    return found


def test_no_code_is_made_of_data() -> None:
    """Nothing in the product unpickles, evaluates or executes; a person's own reward function, in a
    file that the command line names, is the one exception."""
    for text in ("import pickle", "from marshal import loads", "eval(x)", "yaml.load(x)",
                 "from yaml import unsafe_load", "np.load(x, allow_pickle=True)", "torch.load(x)",
                 "spec.loader.exec_module(m)"):  # fmt: skip
        assert code_from_data(text), text
    assert code_from_data("model.eval(); yaml.safe_load(x); re.compile(x); c.execute(x)") == []
    files = [
        path for part in ("pipeline", "schemas", "jobs") for path in (ROOT / part).rglob("*.py")
    ]
    assert len(files) > 40
    found = {path.relative_to(ROOT).as_posix(): code_from_data(path.read_text()) for path in files}
    found = {name: dangerous for name, dangerous in found.items() if dangerous}
    assert found == {
        "pipeline/rewards.py": ["loader.exec_module"],
        "pipeline/recipes.py": ["yaml.load"],  # by a loader that makes less than the safe one
        # verl's own modules are wrapped once they have run.
        "pipeline/capture/hooks.py": ["spec.loader.exec_module"] * 2,
    }
    assert issubclass(recipes._Loader, yaml.SafeLoader)
