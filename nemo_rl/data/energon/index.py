"""The row index of a `.jsonl` file: written once by the driver, read by every loader.

`<file>.idx` is the index of Energon: one little-endian uint64 byte offset per usable row and then the file size. Row i
is the line that starts at offset i; lines between two offsets that are bad or blank belong to no row. `<file>.idx.crc`
holds one little-endian uint32 per usable row, the CRC-32 of its line: a row whose bytes are no longer those that were
indexed is never handed out. `<file>.idx.json` holds the rest: digest, line numbers and the reasons of bad lines.

Lines end at LF only, with a CR before it tolerated: U+2028 and its kin are data.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nemo_rl.utils.errors import RunError, UserError

ALWAYS_HASHED_BYTES = 64 << 20
"""Up to this size the file is hashed on each start; above it an unchanged size and modification time are trusted."""

_READ_BYTES = 1 << 20
_VERSION = 2


@dataclass(frozen=True)
class JsonlIndex:
    """What is known of a file once it has been read through."""

    index_path: str
    rows: int
    """Usable rows: all lines without the bad and the blank ones."""
    bad_lines: dict[int, str]
    """0-based line to the reason why it is no row."""
    blank_lines: tuple[int, ...]
    digest: str
    """blake2b of the file's bytes, hex."""


def ensure_index(path: Path, cache_dir: Path) -> JsonlIndex:
    """The index of `path`, read or made.

    It is written beside the file, or under `cache_dir` where that can't be written. An index made for other bytes is
    made again, also when the size is the same. Several processes may call this at once.

    Raises:
        UserError: the index can be written nowhere, or the file grew or shrank while it was read through.
    """
    places = [path.with_name(path.name + ".idx"), _cache_place(path, cache_dir)]
    for place in places:
        found = _read_index(path, place)
        if found is not None:
            return found
    stat = path.stat()
    scan = _scan(path)
    after = path.stat()
    if (after.st_size, after.st_mtime_ns, scan.bytes) != (stat.st_size, stat.st_mtime_ns, stat.st_size):
        raise UserError(f"{path}: changes while it is indexed: wait until it is written")
    refused: list[OSError] = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, np.asarray([*scan.offsets, stat.st_size], dtype="<u8").tobytes())
            _replace(_checks_path(place), np.asarray(scan.checks, dtype="<u4").tobytes())
            # Last, because it vouches for the two others.
            _replace(_notes_path(place), json.dumps(_notes(scan.summary, stat), indent=1).encode())
        except OSError as error:
            refused.append(error)
        else:
            return JsonlIndex(str(place), **scan.summary)
    raise UserError(
        f"{path}: its row index can be written neither beside it nor as {places[-1]} ({refused[-1]}): "
        f"set data.energon.nvdataset_cache_dir to a folder that can be written"
    )


def parse_row(content: bytes) -> dict[str, Any]:
    """The JSON object that the UTF-8 bytes spell. Raises `ValueError` that says what they are instead."""
    try:
        row = json.loads(content.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"not an object but {type(row).__name__}")
    return row


def source_id(row: Mapping[str, Any], where: str) -> str:
    """The name of a row in logs: its own `id` as text, else `where`."""
    own = row.get("id")
    return where if own in (None, "") else str(own)


class JsonlReader:
    """Random access to the rows of an indexed file, in the shape Energon's sample loader reads from.

    Opening it raises `UserError` where the file no longer has the indexed size, reading a row raises `RunError` where
    the row no longer has the indexed bytes. A file that is put in the place of the indexed one is noticed when the
    reader is opened again; until then the open file is read, which is still the indexed one.
    """

    def __init__(self, path: str, index_path: str, skipped_lines: tuple[int, ...]):
        """`skipped_lines`: sorted 0-based lines that are no rows."""
        self._path = path
        self._name = Path(path).name
        try:
            self._offsets = np.fromfile(index_path, dtype="<u8").astype(np.int64)
            self._checks = np.fromfile(_checks_path(Path(index_path)), dtype="<u4")
            size = Path(path).stat().st_size
        except OSError as error:
            raise UserError(
                f"{path}: can't be read by this worker ({error}): every node must see data and index"
            ) from None
        if len(self._offsets) != len(self._checks) + 1 or self._offsets[-1] != size:
            raise UserError(f"{path}: has changed since its index was made: start again")
        # Line k of the skipped ones is followed by row `skipped[k] - k`.
        self._rows_before_skip = np.asarray(skipped_lines, dtype=np.int64) - np.arange(len(skipped_lines))
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def line_of(self, row: int) -> int:
        """The 0-based line of a row, counted over all lines."""
        return row + int(np.searchsorted(self._rows_before_skip, row, side="right"))

    def __getitem__(self, row: int) -> dict[str, Any]:
        # A handle opened here and not in `__init__`: a forked loader process must not share the file position.
        if self._file is None:
            self._file = Path(self._path).open("rb")  # noqa: SIM115 - closed by `close`
        self._file.seek(self._offsets[row])
        line = self._file.read(int(self._offsets[row + 1] - self._offsets[row])).split(b"\n", 1)[0]
        where = f"{self._name}:{self.line_of(row)}"
        if zlib.crc32(line) != self._checks[row]:
            raise RunError(
                f"row {where} of {self._path} has changed since the run began: its bytes are not those that were "
                "indexed; leave the data alone during a run, and start again"
            )
        return {"__key__": str(row), "__shard__": self._name, "where": where, "json": line}

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class _Scan:
    """One reading of a file: byte offset and CRC-32 of each usable row, its length, and the rest of a `JsonlIndex`."""

    offsets: list[int]
    checks: list[int]
    bytes: int
    summary: dict[str, Any]


def _scan(path: Path) -> _Scan:
    offsets: list[int] = []
    checks: list[int] = []
    bad: dict[int, str] = {}
    blank: list[int] = []
    digest = hashlib.blake2b(digest_size=32)
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            digest.update(line)
            if not line.strip():
                blank.append(number)
            elif (reason := _why_bad(line)) is not None:
                bad[number] = reason
            else:
                offsets.append(offset)
                checks.append(zlib.crc32(line.removesuffix(b"\n")))
            offset += len(line)
    summary = {"rows": len(offsets), "bad_lines": bad, "blank_lines": tuple(blank), "digest": digest.hexdigest()}
    return _Scan(offsets, checks, offset, summary)


def _why_bad(line: bytes) -> str | None:
    try:
        parse_row(line)
    except ValueError as error:
        return str(error)
    return None


def _read_index(path: Path, place: Path) -> JsonlIndex | None:
    try:
        notes = json.loads(_notes_path(place).read_bytes())
        index_bytes, check_bytes = place.stat().st_size, _checks_path(place).stat().st_size
    except (OSError, ValueError):
        return None
    stat = path.stat()
    if notes.get("version") != _VERSION or notes["size"] != stat.st_size:
        return None
    if index_bytes != 8 * (notes["rows"] + 1) or check_bytes != 4 * notes["rows"]:
        return None
    trusted = notes["mtime_ns"] == stat.st_mtime_ns and stat.st_size > ALWAYS_HASHED_BYTES
    if not trusted and notes["digest"] != _digest(path):
        return None
    bad = {int(line): reason for line, reason in notes["bad_lines"].items()}
    return JsonlIndex(str(place), notes["rows"], bad, tuple(notes["blank_lines"]), notes["digest"])


def _notes(index: dict[str, Any], stat: os.stat_result) -> dict[str, Any]:
    return {"version": _VERSION, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, **index}


def _notes_path(place: Path) -> Path:
    return place.with_name(place.name + ".json")


def _checks_path(place: Path) -> Path:
    return place.with_name(place.name + ".crc")


def _cache_place(path: Path, cache_dir: Path) -> Path:
    folder = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return cache_dir / "index" / folder / f"{path.name}.idx"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write aside and rename, so that a reader sees the old file or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
