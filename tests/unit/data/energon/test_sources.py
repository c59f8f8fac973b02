"""What the driver finds out about a `.jsonl` file before workers start.

Not covered: a folder on a file system that is mounted read-only; a place that can't be written stands in for it.
"""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_rl.data.energon import index
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.sources import PreparedSource, batches_per_pass, open_reader, prepare_source, rows_per_shard
from nemo_rl.utils.errors import UserError

from .conftest import write_rows

GOOD = b'{"id": "good"}'


def prepare(path: Path, **options: object) -> PreparedSource:
    return prepare_source(EnergonSourceConfig(path=str(path), **options), cache_dir=str(path.parent / "cache"))


def read_all(prepared: PreparedSource) -> list[dict]:
    reader = open_reader(prepared)
    rows = [reader[row] for row in range(len(reader))]
    reader.close()
    return [{"where": row["where"], **json.loads(row["json"])} for row in rows]


def test_index_is_the_one_energon_would_write(case: Callable[[str], Path]):
    path = case("b14_twentyfour_rows.jsonl")
    prepared = prepare(path)
    lines = path.read_bytes().split(b"\n")[:-1]
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    assert prepared.index_path == f"{path}.idx"
    assert np.array_equal(np.fromfile(prepared.index_path, dtype="<u8"), starts)
    assert prepared.rows == 24
    assert [row["id"] for row in read_all(prepared)] == list(range(24))


def test_b13_unicode_separators_are_data(case: Callable[[str], Path]):
    prepared = prepare(case("b13_unicode_separators.jsonl"))
    rows = read_all(prepared)
    assert prepared.rows == 2
    contents = [row["messages"][0]["content"] for row in rows]
    assert [len(text.encode()) for text in contents] == [35, 9]


@pytest.mark.parametrize("last_newline", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_line_ends_blank_and_bad_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture, last_newline: bytes):
    lines = [b"", b"no json", b'{"id": 0}', b"[1]", b'{"id": 1}\r', b"\xff\xfe\xfd", b'{"id": 2}', b'{"id": ']
    lines += [b"[" * 100_000, b'{"id": 3}']
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines) + last_newline)
    with caplog.at_level(logging.WARNING):
        prepared = prepare(path)
    assert [(row["where"], row["id"]) for row in read_all(prepared)] == [
        ("mixed.jsonl:2", 0),
        ("mixed.jsonl:4", 1),
        ("mixed.jsonl:6", 2),
        ("mixed.jsonl:9", 3),
    ]
    assert prepared.bad_lines == {
        1: "not JSON: Expecting value at column 1",
        3: "not an object but list",
        5: "not UTF-8 text",
        7: "not JSON: Expecting value at column 7",
        8: "nested too deeply",
    }
    assert "left out 5 bad lines; the first is mixed.jsonl:1" in caplog.text
    # A second look reads the same from the notes beside the index.
    assert prepare(path) == prepared


@pytest.mark.parametrize("size_limit", [index.ALWAYS_HASHED_BYTES, 0])
def test_an_edit_of_the_same_size_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_limit: int):
    monkeypatch.setattr(index, "ALWAYS_HASHED_BYTES", size_limit)
    path = tmp_path / "edited.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 22222}\n')
    first = prepare(path)
    before = path.stat()
    path.write_bytes(b'{"a": 11111}\n{"b": 2}\n')
    if size_limit:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = prepare(path)
    assert path.stat().st_size == before.st_size
    assert second.identity["digest"] != first.identity["digest"]
    assert [row["where"] for row in read_all(second)] == ["edited.jsonl:0", "edited.jsonl:1"]
    assert read_all(second)[0]["a"] == 11111


def test_index_goes_to_the_cache_where_the_folder_cannot_be_written(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 3)
    (tmp_path / "rows.jsonl.idx").mkdir()
    prepared = prepare(path)
    assert prepared.index_path.startswith(str(tmp_path / "cache"))
    assert [row["n"] for row in read_all(prepared)] == [0, 1, 2]
    assert prepare(path) == prepared
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="nvdataset_cache_dir"):
        prepare_source(EnergonSourceConfig(path=str(path)), cache_dir=str(tmp_path / "file" / "x"))


def test_a_file_that_changed_after_the_index_is_refused_by_the_reader(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 3)
    prepared = prepare(path)
    write_rows(path, 4)
    with pytest.raises(UserError, match="has changed since its index was made"):
        open_reader(prepared)
    path.unlink()
    with pytest.raises(UserError, match="can't be read by this worker"):
        open_reader(prepared)


def test_bad_sources_are_named(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "broken.jsonl").write_text("x\n")
    (tmp_path / "rows.json").write_text("{}")
    (tmp_path / "blend.yaml").write_text("{}")
    (tmp_path / "folder").mkdir()
    said = {
        "absent.jsonl": "data.train.path: .*absent.jsonl does not exist",
        "empty.jsonl": "has no rows",
        "blank.jsonl": "has no rows",
        "broken.jsonl": "no usable row; line 0, counted from 0, is not JSON",
        "rows.json": "suffix '.json': give a .jsonl file",
        "blend.yaml": "blends of several sources are not supported",
        "folder": "folder without .tar files",
    }
    for name, message in said.items():
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / name)
    with pytest.raises(UserError, match=r"data\.validation\.path"):
        prepare_source(EnergonSourceConfig(path="/nowhere"), key="data.validation")


def test_limit_takes_the_first_rows(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    assert prepare(path, limit=4).rows == 4
    assert prepare(path, limit=40).rows == 10


def test_limit_counts_the_bad_lines_it_passes(tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join([b"x", GOOD, b"", b"y", GOOD, b"z", GOOD, b"[]"]))
    for limit, bad in {1: [0], 2: [0, 3], 3: [0, 3, 5, 7], 9: [0, 3, 5, 7]}.items():
        prepared = prepare(path, limit=limit)
        assert list(prepared.bad_lines) == bad
        rows = read_all(prepared)[: prepared.rows]
        assert [row["where"] for row in rows] == ["mixed.jsonl:1", "mixed.jsonl:4", "mixed.jsonl:6"][:limit]


# All that Python takes for the end of a line; JSON wants those below a space escaped.
SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r"


@pytest.mark.parametrize("place", ["id", "key", "question", "last character of the line"])
def test_b13_separators_anywhere_in_a_row(tmp_path: Path, place: str):
    text = f"a{SEPARATORS}b\u2028"
    row = {"id": 1, "question": "q", "answer": "a"}
    row |= {text: "x"} if place == "key" else {"answer" if place.startswith("last") else place: text}
    # CR LF ends the first line, and the file ends without LF.
    path = tmp_path / "rows.jsonl"
    line = json.dumps(row, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n{line}".encode())
    assert len(line.splitlines()) > 1
    prepared = prepare(path)
    assert (prepared.rows, prepared.bad_lines) == (2, {})
    for number, read in enumerate(read_all(prepared)):
        assert read.pop("where") == f"rows.jsonl:{number}"
        assert read == row


def test_shards_differ_by_at_most_one_row():
    for rows in (1, 2, 3, 7, 24, 1319):
        for shards in (1, 2, 3, 4, 8):
            counts = rows_per_shard(rows, shards)
            assert len(counts) == shards
            assert sum(counts) == rows
            assert max(counts) - min(counts) <= 1
    prepared = PreparedSource(kind="jsonl", path="", index_path="", rows=10, split="")
    assert [batches_per_pass(prepared, shards, 2) for shards in (1, 2, 4, 16)] == [5, 3, 2, 1]
