"""--tokenizer: lengths in tokens for logs that hold text only."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Made
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from rollsift.jobs.main import main
from rollsift.pipeline import aids
from rollsift.pipeline.aids import Aids, Tokenizer
from rollsift.pipeline.batch import filter_logs
from rollsift.pipeline.sources import discover
from rollsift.pipeline.sql import query
from rollsift.pipeline.store import Run
from rollsift.schemas.errors import InputError, UsageError
from rollsift.schemas.recipe import resolve

# Tokens, written out by hand: words and marks, one each, whatever their length.
COUNTS = {"a": 1, "a very long-winded answer": 6, "1+1=2": 5, "": 0, "<s> unheard": 4}


def _tokenizer(folder: Path, words: Sequence[str] = ("a", "very")) -> Path:
    """A tokenizer.json of whole words that would add <s>, cut at 2 tokens and pad to 9."""
    made = Made(
        WordLevel({"<unk>": 0, "<s>": 1} | {w: i + 2 for i, w in enumerate(words)}, "<unk>")
    )
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(2)
    made.enable_padding(length=9)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _log(folder: Path, outputs: Sequence[str | None], **fields: Any) -> Path:
    """A V0 dump of one group; each further field holds one value a row."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"input": "q", "output": output, "score": 1.0, "step": 1}
        | {name: values[i] for name, values in fields.items()}
        for i, output in enumerate(outputs)
    ]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _filtered(logs: Path, out: Path, path: Path | None, **recipe: Any) -> Run:
    filter_logs(discover([logs]), resolve(recipe), out, aids=Aids.named(path, None))
    return Run(out)


def _lengths(run: Run) -> list[tuple[int | None, str]]:
    return query(
        run, "SELECT response_length, length_source FROM rollouts ORDER BY source_row"
    ).fetchall()


def test_tokens_are_counted_as_they_stand(tmp_path: Path) -> None:
    """A length is the number of the text's tokens: none added, cut off or padded."""
    run = _filtered(_log(tmp_path / "logs", list(COUNTS)), tmp_path / "run", _tokenizer(tmp_path))
    assert _lengths(run) == [(count, "tokenizer") for count in COUNTS.values()]
    assert run.steps()[1].manifest.length_unit == "tokens"


def test_it_decides_what_is_kept(tmp_path: Path) -> None:
    """The shortest is the one of fewest tokens, which may be the one of most characters."""
    logs = _log(tmp_path / "logs", ["1+1=2", "incomprehensibilities"])
    by_tokens = _filtered(logs, tmp_path / "a", _tokenizer(tmp_path), k=1)
    by_chars = _filtered(logs, tmp_path / "b", _tokenizer(tmp_path), k=1, length="chars")
    assert by_tokens.steps()[1].manifest.row == [1]
    assert by_chars.steps()[1].manifest.row == [0]
    assert _lengths(by_chars) == [(5, "chars"), (21, "chars")]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_counts_are_equal_in_any_batch(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However texts are batched, each has its own count, and null has null."""
    monkeypatch.setattr(aids, "BATCH", size)
    texts = [None, *COUNTS, None, None, *COUNTS]
    found = Tokenizer(_tokenizer(tmp_path)).count(pl.Series(texts, dtype=pl.String))
    assert found.to_list() == [None if text is None else COUNTS[text] for text in texts]
    assert Tokenizer(tmp_path).count(pl.Series([], dtype=pl.String)).to_list() == []
    assert Tokenizer(tmp_path).count(pl.Series([None], dtype=pl.String)).to_list() == [None]


def test_a_null_response_has_no_length(tmp_path: Path) -> None:
    """Null is `no_response`, which is not the same as an empty text of 0 tokens."""
    run = _filtered(
        _log(tmp_path / "logs", ["a", None, ""]), tmp_path / "run", _tokenizer(tmp_path)
    )
    found = query(run, "SELECT reason, response_length FROM rollouts ORDER BY source_row")
    assert found.fetchall() == [(None, 1), ("no_response", None), ("empty", 0)]


@pytest.mark.parametrize(
    ("columns", "due"),
    [
        ({"response_ids": [[1, 2, 3]], "response_mask": [[1, 0, 1]]}, (2, "tokens")),
        ({"response_ids": [[1, 2, 3]]}, (3, "tokens")),
        ({"response_length": [7]}, (7, "logged")),
        ({}, (2, "tokenizer")),
    ],
)
def test_what_the_log_says_comes_first(
    columns: dict[str, Any], due: tuple[int, str], tmp_path: Path
) -> None:
    """The mask's sum, the ids, a logged count: only where there is none of them is text counted."""
    (tmp_path / "logs").mkdir()
    table = pa.table({"uid": ["g"], "step": [1], "score": [1.0], "output": ["a very"]} | columns)
    pq.write_table(table, tmp_path / "logs/1.parquet")
    for length in ("auto", "tokens"):
        out = tmp_path / length
        assert _lengths(_filtered(tmp_path / "logs", out, _tokenizer(tmp_path), length=length)) == [
            due
        ]


def test_length_in_tokens_of_text_needs_a_tokenizer(tmp_path: Path) -> None:
    """Without one, length=tokens of a text log names the option."""
    logs = _log(tmp_path / "logs", ["a"])
    with pytest.raises(InputError, match="length=tokens, but it has text only; name --tokenizer"):
        _filtered(logs, tmp_path / "run", None, length="tokens")
    assert _lengths(_filtered(logs, tmp_path / "auto", None)) == [(1, "chars")]


def test_the_file_is_pinned(tmp_path: Path) -> None:
    """Every manifest and run.json hold the tokenizer's digest; kept rows stay rows of the log."""
    path = _tokenizer(tmp_path)
    logs = _log(tmp_path / "logs", ["a", "a very"])
    run = _filtered(logs, tmp_path / "run", path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    first, second = run.steps()[1].manifest.sources
    assert (first.file, first.rows) == ("1.jsonl", 2)
    assert (second.file, second.rows, second.digest) == ("tokenizer.json", 0, digest)
    assert run.steps()[1].manifest.source == [0, 0]
    assert run.info.reader == {"tokenizer": {"name": "tokenizer.json", "sha256": digest}}


def test_a_folder_and_its_file_are_one_tokenizer(tmp_path: Path) -> None:
    """The folder of a model and the tokenizer.json in it give equal ids, also a second time."""
    path = _tokenizer(tmp_path / "model")
    logs = _log(tmp_path / "logs", ["a", "a very"])
    runs = [_filtered(logs, tmp_path / "a", at) for at in (path, path.parent)]
    runs.append(_filtered(logs, tmp_path / "b", path))
    assert len({run.steps()[1].id for run in runs}) == 1
    assert runs[0].versions() == {1: 1}


@pytest.mark.parametrize("other", [None, ("a", "other", "words")])
def test_another_tokenizer_is_another_run(other: Any, tmp_path: Path) -> None:
    """Into a run made with one, neither a changed file nor no tokenizer may write."""
    logs = _log(tmp_path / "logs", ["a"])
    run = _filtered(logs, tmp_path / "run", _tokenizer(tmp_path))
    before = run.steps()
    path = other and _tokenizer(tmp_path, other)
    with pytest.raises(UsageError, match=r"made with another reader: tokenizer\."):
        _filtered(logs, tmp_path / "run", path)
    assert run.steps() == before


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"{}", "not a tokenizer.json")]
)
def test_what_is_no_tokenizer_is_a_usage_error(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    """A missing or a wrong file names the option and the path."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"--tokenizer .*tokenizer.json: {message}"):
        Tokenizer(tmp_path if content is not None else path)


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the message says what to install; without the option all goes on."""
    path = _tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    logs = _log(tmp_path / "logs", ["a"])
    with pytest.raises(UsageError, match=r"pip install 'rollsift\[tokenizer\]'"):
        _filtered(logs, tmp_path / "run", path)
    assert _lengths(_filtered(logs, tmp_path / "run", None)) == [(1, "chars")]


def test_the_command_line_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """filter and stats both measure in tokens by it, and say so."""
    path, logs = _tokenizer(tmp_path), _log(tmp_path / "logs", ["a", "a very long-winded answer"])
    options = ["--tokenizer", str(path), str(logs)]
    for command in (
        ["stats", "-f", "json", *options],
        ["filter", "-r", "gfpo-shortest", "-s", "k=1", "-o", str(tmp_path / "run"), *options],
    ):
        with pytest.raises(SystemExit, match="0"):
            main(command)
    out, err = capsys.readouterr()
    facts, end = json.JSONDecoder().raw_decode(out)
    shown = {fact["name"]: fact["value"] for fact in facts}
    assert shown["length unit"] == "tokens"
    assert shown["response_length/mean"] == 3.5
    assert "tokens in responses" in out[end:]
    assert "characters" not in err
