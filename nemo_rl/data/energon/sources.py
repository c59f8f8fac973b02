"""From `data.train` / `data.validation` to a source that loaders can open: checked and indexed once, by the driver."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from nemo_rl.data.energon import webdataset
from nemo_rl.data.energon.config import EnergonSourceConfig
from nemo_rl.data.energon.index import JsonlReader, ensure_index
from nemo_rl.utils.errors import UserError

log = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = "~/.cache/onehop"
SLICES_PER_SOURCE = 10_000
"""A source is read in about so many slices; their order is the random part of a pass."""


@dataclass(frozen=True)
class PreparedSource:
    """A source whose rows are counted. Crosses to the workers; holds no rows and no open file."""

    kind: Literal["jsonl", "webdataset"]
    path: str
    index_path: str
    """The `.idx` file, or the `.nv-meta` folder."""
    rows: int
    """Rows of one pass: usable ones, at most `limit`."""
    split: str
    bad_lines: dict[int, str] = field(default_factory=dict)
    """0-based line to the reason why it is no row; of a `.jsonl` file only, up to its last row that is used."""
    skipped_lines: tuple[int, ...] = ()
    """Bad and blank lines up to there, sorted."""
    subflavors: dict[str, Any] = field(default_factory=dict)
    """Of the folder's `dataset.yaml`; they select the cooker."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What a resume must find again: name, content digest, split, number of rows."""

    def slice_rows(self, max_samples_per_sequence: int | None) -> int:
        """Rows that are read in file order before the reader jumps."""
        return max_samples_per_sequence or max(1, self.rows // SLICES_PER_SOURCE)


def prepare_source(
    source: EnergonSourceConfig, *, key: str = "data.train", cache_dir: str | None = None
) -> PreparedSource:
    """Check and index a source. Called by the driver, once, before workers start.

    Bad lines of a `.jsonl` file are left out, counted and logged with file and line. `key` is the config section that
    messages name; `cache_dir` holds the index where the data lies on a read-only place.

    Raises:
        UserError: no such file, no usable row, an empty or unprepared folder, a missing split, an unknown suffix.
    """
    # Absolute, because workers may run in another folder; not resolved, because a link may have the better name.
    path = Path(source.path).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{key}.path: {source.path} does not exist")
    if path.is_dir():
        return _prepare_folder(source, path, key)
    if path.suffix == ".jsonl":
        return _prepare_jsonl(source, path, key, Path(cache_dir or DEFAULT_CACHE_DIR).expanduser())
    remedy = (
        "blends of several sources are not supported; name one source"
        if path.suffix in (".yaml", ".yml")
        else ("give a .jsonl file or a prepared folder of .tar files")
    )
    raise UserError(f"{key}.path: {source.path} has the suffix {path.suffix or '(none)'!r}: {remedy}")


def rows_per_shard(rows: int, num_logical_shards: int) -> list[int]:
    """Rows of each shard, as Energon splits them: contiguous shares that differ by at most one row."""
    from megatron.energon.flavors.webdataset.sharder import Sharder
    from megatron.energon.worker import WorkerConfig

    # One rank with N workers is split like N ranks with one worker each.
    borders = Sharder.split_samples_to_workers(
        0, rows, WorkerConfig(rank=0, world_size=1, num_workers=num_logical_shards)
    )
    return [end - start for start, end in pairwise(borders)]


def batches_per_pass(prepared: PreparedSource, num_logical_shards: int, rows_per_shard_batch: int) -> int:
    """Steps of one pass: that of the shard with most rows. Shards with fewer rows complete theirs with fillers."""
    # Shares differ by at most one row; asking Energon would cost the driver its import.
    return math.ceil(math.ceil(prepared.rows / num_logical_shards) / rows_per_shard_batch)


def open_reader(prepared: PreparedSource) -> Any:
    """Random access to the rows of a source, for Energon's sample loader."""
    if prepared.kind == "jsonl":
        return JsonlReader(prepared.path, prepared.index_path, prepared.skipped_lines)
    return webdataset.WebdatasetReader(prepared.path, prepared.split)


def _prepare_jsonl(source: EnergonSourceConfig, path: Path, key: str, cache_dir: Path) -> PreparedSource:
    index = ensure_index(path, cache_dir)
    if not index.rows:
        if index.bad_lines:
            line, reason = next(iter(index.bad_lines.items()))
            raise UserError(f"{key}.path: {path} has no usable row; line {line}, counted from 0, is {reason}")
        raise UserError(f"{key}.path: {path} has no rows")
    rows = min(index.rows, source.limit or index.rows)
    skipped = sorted([*index.bad_lines, *index.blank_lines])
    if rows < index.rows:
        # Of lines behind the last row that is used, nothing is read and nothing counted.
        skipped = [line for place, line in enumerate(skipped) if line - place < rows]
    bad_lines = {line: index.bad_lines[line] for line in skipped if line in index.bad_lines}
    if bad_lines:
        line, reason = next(iter(bad_lines.items()))
        log.warning("%s: left out %d bad lines; the first is %s:%d (%s)", path, len(bad_lines), path.name, line, reason)
    return PreparedSource(
        kind="jsonl",
        path=str(path),
        index_path=index.index_path,
        rows=rows,
        split=source.split,
        bad_lines=bad_lines,
        skipped_lines=tuple(skipped),
        identity={"name": path.name, "digest": index.digest, "rows": rows},
    )


def _prepare_folder(source: EnergonSourceConfig, path: Path, key: str) -> PreparedSource:
    total, digest = webdataset.check_folder(path, source.split, key)
    rows = min(total, source.limit or total)
    return PreparedSource(
        kind="webdataset",
        path=str(path),
        index_path=str(path / webdataset.META_FOLDER),
        rows=rows,
        split=source.split,
        subflavors=webdataset.subflavors(path),
        identity={"name": path.name, "digest": digest, "rows": rows, "split": source.split},
    )
