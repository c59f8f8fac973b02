"""A `.jsonl` file that changes under a running job: the bytes that were indexed are trained, or the run ends.

Not covered: a change inside a row that keeps its CRC-32, which one in four thousand million does by chance.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.energon import index
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.replica import ReplicaLoaders
from nemo_rl.data.energon.sources import open_reader, prepare_source
from nemo_rl.utils.errors import RunError, UserError

from .conftest import loaders, write_rows

ROWS, PER_BATCH = 400, 50
IN_ORDER = {"shuffle": False}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """400 rows, 39 kB: more than the first read takes in."""
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def edit_row(path: Path, line: int) -> None:
    """Write another letter into the answer of a line, in place."""
    content = bytearray(path.read_bytes())
    start = [0, *(match.end() for match in re.finditer(b"\n", content))][line]
    at = content.index(b'"a"', start) + 1
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"X")


def lines_until_the_end(source: ReplicaLoaders, steps: int) -> tuple[list[int], Exception]:
    """The lines of whole batches, and what ended them."""
    seen: list[int] = []
    with pytest.raises((RunError, UserError)) as failure:
        for _ in range(steps):
            seen += [int(row.source_id.split(":")[1]) for row in source.next_train().rows]
    source.close()
    assert "\n" not in str(failure.value)
    return seen, failure.value


@pytest.mark.parametrize("processes", [0, 1])
def test_an_edit_of_the_same_size_names_file_and_row(tokenizer: PreTrainedTokenizerBase, path: Path, processes: int):
    source = loaders(tokenizer, path, rows_per_shard=PER_BATCH, data=IN_ORDER, energon={"num_workers": processes})
    edit_row(path, 390)
    seen, error = lines_until_the_end(source, 8)
    assert seen == list(range(350))
    assert isinstance(error, RunError)
    assert str(error).startswith(f"row rows.jsonl:390 of {path} has changed since the run began")


def test_an_edit_between_two_steps(tokenizer: PreTrainedTokenizerBase, path: Path):
    source = loaders(tokenizer, path, rows_per_shard=PER_BATCH, data=IN_ORDER)
    source.next_train()
    edit_row(path, 377)
    seen, error = lines_until_the_end(source, 8)
    assert seen == list(range(50, 350))
    assert "row rows.jsonl:377" in str(error)


def test_a_file_that_is_cut_off(tokenizer: PreTrainedTokenizerBase, path: Path):
    source = loaders(tokenizer, path, rows_per_shard=PER_BATCH, data=IN_ORDER)
    source.next_train()
    os.truncate(path, path.stat().st_size - 150)
    seen, error = lines_until_the_end(source, 8)
    assert seen == list(range(50, 350))
    assert "row rows.jsonl:398" in str(error)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"question": "q", "answer": "a"}\n')


def replace_by_other_rows(path: Path) -> None:
    other = write_rows(path.with_name("other.jsonl"), ROWS)
    edit_row(other, 0)
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (grow, "rows.jsonl: has changed since its index was made"),
        (replace_by_other_rows, "row rows.jsonl:0 of .* has changed since the run began"),
        (Path.unlink, "rows.jsonl: can't be read by this worker"),
    ],
)
def test_a_change_that_leaves_the_open_file_alone_is_noticed_at_the_next_pass(
    tokenizer: PreTrainedTokenizerBase, path: Path, change: Callable[[Path], None], said: str
):
    """Until then the indexed rows are read: a file that is renamed into place is another file."""
    source = loaders(tokenizer, path, rows_per_shard=PER_BATCH, data=IN_ORDER)
    source.next_train()
    change(path)
    seen, error = lines_until_the_end(source, 9)
    assert seen == list(range(50, 400))
    assert re.search(said, str(error))


def test_the_next_run_takes_the_new_rows(tokenizer: PreTrainedTokenizerBase, path: Path):
    prepare_source(EnergonSourceConfig(path=str(path)))
    edit_row(path, 5)
    source = loaders(tokenizer, path, rows_per_shard=PER_BATCH, data=IN_ORDER)
    row = source.next_train().rows[5]
    source.close()
    assert bytes(token for token in row.input_ids if token < 256).endswith(b"assistant\nX\n")


@pytest.mark.parametrize("content", [None, b"", b"abc"])
def test_an_index_without_its_checks_is_made_again(path: Path, content: bytes | None):
    prepared = prepare_source(EnergonSourceConfig(path=str(path)))
    checks = Path(f"{prepared.index_path}.crc")
    whole = checks.read_bytes()
    assert len(whole) == 4 * ROWS
    checks.unlink()
    if content is not None:
        checks.write_bytes(content)
        with pytest.raises(UserError, match="has changed since its index was made"):
            open_reader(prepared)
    assert prepare_source(EnergonSourceConfig(path=str(path))) == prepared
    assert checks.read_bytes() == whole


def test_a_file_that_is_still_being_written_is_not_indexed(path: Path, monkeypatch: pytest.MonkeyPatch):
    scan = index._scan

    def scan_while_it_grows(path: Path) -> index._Scan:
        found = scan(path)
        grow(path)
        return found

    monkeypatch.setattr(index, "_scan", scan_while_it_grows)
    with pytest.raises(UserError, match=r"rows.jsonl: changes while it is indexed: wait until it is written"):
        prepare_source(EnergonSourceConfig(path=str(path)))
    assert not Path(f"{path}.idx").exists()
