"""Energon WebDataset folders: `.tar` shards beside a `.nv-meta` folder that says which shards make a split."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import sqlite3
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_rl.utils.errors import RunError, UserError

log = logging.getLogger(__name__)

META_FOLDER = ".nv-meta"
_SAMPLED_BYTES = 64 << 10
_OFFSET = struct.Struct("=Q")
"""An entry of `<shard>.tar.idx`: the byte where a row begins; the last one is where the rows end."""


def check_folder(path: Path, split: str, key: str) -> tuple[int, str]:
    """Rows of a split and a digest of its shards: names, sizes, first and last 64 KiB. Prepares an unprepared folder.

    Raises:
        UserError: naming `key` and the folder: empty, can't be prepared, no such split, a shard that is missing, has no
            rows, or is not as long as its index says.
    """
    from megatron.energon.flavors.webdataset.metadata import check_dataset_info_present

    if not check_dataset_info_present(_epath(path)):
        if next(path.rglob("*.tar"), None) is None:
            raise UserError(f"{key}.path: {path} is a folder without .tar files")
        prepare_folder(path)
    splits = _splits(path, key)
    if split not in splits:
        raise UserError(f"{key}.split: {path} has no split {split!r}, it has {', '.join(sorted(splits)) or 'none'}")
    if not splits[split]:
        raise UserError(f"{key}.split: split {split!r} of {path} has no shards")
    shards = _meta(path, split).shards
    for shard in shards:
        if not (path / shard.name).is_file():
            raise UserError(f"{key}.path: {path} has no shard {shard.name}, though its {META_FOLDER} names it")
        if shard.count == 0:
            raise UserError(f"{key}.path: shard {shard.name} of {path} has no rows")
        _check_length(path, shard.name, key)
    return sum(shard.count for shard in shards), _digest(path, [shard.name for shard in shards])


def prepare_folder(path: Path) -> dict[str, int]:
    """Write the `.nv-meta` folder of a folder of `.tar` files. Returns the rows of each split.

    Shards whose name starts with `val` or `test` make the split of that name, all others make `train`.

    Raises:
        UserError: a shard that can't be read or has no row, a key that two rows share, or a folder that can't be
            written.
    """
    from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory

    names = [str(tar.relative_to(path)) for tar in sorted(path.rglob("*.tar"))]
    by_split: dict[str, list[str]] = {}
    for name in names:
        _check_tar(path / name)
        stem = Path(name).name
        split = next((s for s in ("val", "test") if stem.startswith(s)), "train")
        by_split.setdefault(split, []).append(name)
    said = io.StringIO()
    try:
        # Energon reports its progress by `print`.
        with contextlib.redirect_stdout(said):
            BaseWebdatasetFactory.prepare_dataset(
                path,
                names,
                split_parts_ratio=[("train", 1.0)],
                shuffle_seed=None,
                workers=min(4, os.cpu_count() or 1),
            )
    except (OSError, ValueError, AssertionError, sqlite3.Error) as error:
        raise UserError(f"{path}: can't be prepared: {error}") from error
    # How it ends the process when two shards have a key in common, after a page of printed advice.
    except SystemExit:
        raise UserError(f"{path}: can't be prepared: {_shared_key(path, names) or said.getvalue().strip()}") from None
    log.info("%s: prepared %d shards: %s", path, len(names), ", ".join(by_split))
    meta = path / META_FOLDER
    (meta / "split.yaml").write_text(json.dumps({"split_parts": by_split, "exclude": []}, indent=1))
    (meta / "dataset.yaml").write_text(json.dumps({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}))
    return {split: sum(shard.count for shard in _meta(path, split).shards) for split in by_split}


def subflavors(path: Path) -> dict[str, Any]:
    """The `subflavors` of the folder's `dataset.yaml`."""
    from megatron.energon.eyaml import load_yaml_json

    file = path / META_FOLDER / "dataset.yaml"
    content = load_yaml_json(_epath(file)) if file.is_file() else None
    return dict((content or {}).get("subflavors") or {})


class WebdatasetReader:
    """The rows of a split in the shape Energon's sample loader reads from; the JSON member comes as bytes."""

    def __init__(self, path: str, split: str):
        from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader

        meta = _meta(Path(path), split)
        self._path, self._split = path, split
        self._reader = ShardInfosITarReader(
            _epath(Path(path)),
            meta.shards,
            part_filter=None,
            sample_filter=lambda key: key not in meta.sample_excludes,
            itar_cache_size=16,
        )

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, row: int) -> dict[str, Any] | None:
        """The row, or None where the split leaves it out. Raises `RunError` where the shard can't be read there."""
        try:
            sample = self._reader[row]
        # A damaged shard fails in the tar library and in Energon's checks of what that returns.
        except (OSError, tarfile.TarError, ValueError, AttributeError) as error:
            raise RunError(
                f"{self._path}: row {row} of split {self._split}, counted from 0, can't be read: {error}: the shard is "
                f"damaged, or was changed since its {META_FOLDER} was made"
            ) from error
        if sample is None:
            return None
        return {**sample, "where": f"{sample['__shard__']}/{sample['__key__']}"}

    def close(self) -> None:
        """Close the shards; a later read opens them again."""
        self._reader.close()


def _epath(path: Path) -> Any:
    from megatron.energon.epathlib import EPath

    return EPath(path)


def _meta(path: Path, split: str) -> Any:
    from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

    return WebdatasetMeta.from_config(path=_epath(path), split_part=split)


def _check_tar(path: Path) -> None:
    """Energon skips a broken shard with a traceback on the terminal, or hangs on a cut one; we name it first."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            names = [member.name for member in tar if member.isfile()]
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"shard {path} can't be read as an uncompressed .tar file: {error}") from None
    if not names:
        raise UserError(f"shard {path} is empty")
    if next(_keys(names), None) is None:
        raise UserError(f"shard {path} has no row: a member such as {names[0]} has no key, one such as 0001.json has")
    # Energon would keep the last of two members with one name and say nothing.
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"shard {path} holds {twice} more than once: rows need names of their own")


def _check_length(path: Path, name: str, key: str) -> None:
    index = (path / name).with_suffix(".tar.idx")
    try:
        with index.open("rb") as file:
            file.seek(-_OFFSET.size, os.SEEK_END)
            (end,) = _OFFSET.unpack(file.read())
    except OSError as error:
        raise UserError(
            f"{key}.path: the index of shard {name} can't be read ({error}); "
            f"delete {path / META_FOLDER} to make all of it again"
        ) from None
    size = (path / name).stat().st_size
    if size < end:
        raise UserError(
            f"{key}.path: shard {name} of {path} is damaged: it has {size} bytes, its index goes to byte {end}"
        )


def _shared_key(path: Path, names: list[str]) -> str | None:
    """Which key two rows have in common and where, as a sentence."""
    shard_of: dict[str, str] = {}
    for name in names:
        with tarfile.open(path / name, mode="r:") as tar:
            members = [member.name for member in tar if member.isfile()]
        for key, _ in groupby(_keys(members)):
            if key in shard_of:
                return f"{key} in shard {name} is also the key of a row in shard {shard_of[key]}; keys must be unique"
            shard_of[key] = name
    return None


def _keys(members: list[str]) -> Iterator[str]:
    """The key of each member that belongs to a row: its name up to the first dot of the file name."""
    from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re

    for name in members:
        if not skip_meta_re.match(name) and (match := split_name_re.match(name)):
            yield match[1]


def _splits(path: Path, key: str) -> dict[str, list[str]]:
    from megatron.energon.eyaml import load_yaml_json

    for name in ("split.yaml", "split.json"):
        file = path / META_FOLDER / name
        if file.is_file():
            return load_yaml_json(_epath(file))["split_parts"]
    raise UserError(f"{key}.path: {path} has no {META_FOLDER}/split.yaml: run `onehop data prepare {path}` once")


def _digest(path: Path, names: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name in names:
        with (path / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{name}:{size}".encode())
            file.seek(0)
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()
