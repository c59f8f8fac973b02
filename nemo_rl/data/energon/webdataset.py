"""Energon WebDataset folders: `.tar` shards beside a `.nv-meta` folder that says which shards make a split."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import tarfile
from pathlib import Path
from typing import Any

from nemo_rl.utils.errors import UserError

log = logging.getLogger(__name__)

META_FOLDER = ".nv-meta"
_SAMPLED_BYTES = 64 << 10


def check_folder(path: Path, split: str, key: str) -> tuple[int, str]:
    """Rows of a split and a digest of its shards: names, sizes, first and last 64 KiB. Prepares an unprepared folder.

    Raises:
        UserError: naming `key` and the folder: empty, can't be prepared, no such split, a missing shard, no rows.
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
    return sum(shard.count for shard in shards), _digest(path, [shard.name for shard in shards])


def prepare_folder(path: Path) -> dict[str, int]:
    """Write the `.nv-meta` folder of a folder of `.tar` files. Returns the rows of each split.

    Shards whose name starts with `val` or `test` make the split of that name, all others make `train`.

    Raises:
        UserError: a shard that can't be read, or a folder that can't be written.
    """
    from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory

    names = [str(tar.relative_to(path)) for tar in sorted(path.rglob("*.tar"))]
    by_split: dict[str, list[str]] = {}
    for name in names:
        _check_tar(path / name)
        stem = Path(name).name
        split = next((s for s in ("val", "test") if stem.startswith(s)), "train")
        by_split.setdefault(split, []).append(name)
    try:
        # Energon reports its progress by `print`.
        with contextlib.redirect_stdout(io.StringIO()):
            BaseWebdatasetFactory.prepare_dataset(
                path,
                names,
                split_parts_ratio=[("train", 1.0)],
                shuffle_seed=None,
                workers=min(4, os.cpu_count() or 1),
            )
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(f"{path}: can't be prepared: {error}") from error
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
        sample = self._reader[row]
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
            if tar.next() is None:
                raise UserError(f"shard {path} is empty")
            tar.getmembers()
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"shard {path} can't be read as an uncompressed .tar file: {error}") from None


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
