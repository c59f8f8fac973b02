"""Byte-level tokenizer, the 24-row file and short ways to loaders, shared by the tests of the Energon package."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.replica import ReplicaLoaders, build_replica_loaders
from nemo_rl.data.energon.sources import prepare_source

DATA = Path(__file__).parents[3] / "data"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """T0 of the cases: ids 0-255 are the UTF-8 bytes."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "t0")
    tokenizer.chat_template = (DATA / "templates" / "c0_plain.jinja").read_text()
    return tokenizer


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of a case file."""

    def copy(name: str) -> Path:
        return Path(shutil.copy(DATA / "cases" / name, tmp_path / name))

    return copy


def write_rows(path: Path, count: int, *, start: int = 0) -> Path:
    """`count` good rows without an `id`."""
    turns = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    path.write_text("".join(json.dumps({"n": start + i, "messages": turns}) + "\n" for i in range(count)))
    return path


def loaders(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    shards: tuple[int, ...] = (0,),
    num_shards: int = 1,
    rows_per_shard: int = 4,
    seed: int = 0,
    max_length: int = 256,
    restored: dict[int, dict[str, Any]] | None = None,
    validation: bool = False,
    max_validation_batches: int | None = None,
    data: dict[str, Any] | None = None,
    energon: dict[str, Any] | None = None,
) -> ReplicaLoaders:
    """The loaders of one replica over one file, used for training and, if asked, for validation too."""
    config = DataConfig.model_validate({"train": {"path": str(path)}, "energon": energon or {}, **(data or {})})
    prepared = prepare_source(config.train)
    return build_replica_loaders(
        data_config=config,
        tokenizer=tokenizer,
        prepared_train=prepared,
        prepared_validation=prepared if validation else None,
        shards=shards,
        num_logical_shards=num_shards,
        rows_per_shard=rows_per_shard,
        val_rows_per_shard=rows_per_shard,
        max_sequence_length=max_length,
        only_unmask_final=False,
        seed=seed,
        restored_states=restored,
        max_validation_batches=max_validation_batches,
    )
