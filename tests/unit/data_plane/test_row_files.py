"""Rows written to files and put back, over the reference store; the functional test of the queue does it over Ray."""

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.codec import nest
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
from nemo_rl.data_plane.row_files import export_rows, import_rows
from nemo_rl.utils.errors import UserError


def make_client() -> NoOpDataPlaneClient:
    client = NoOpDataPlaneClient()
    client.register_partition("train", [], 4, ["step"])
    return client


def test_the_rows_come_back_as_they_were(tmp_path: Path) -> None:
    client = make_client()
    fields = {
        "input_ids": nest([torch.tensor([1, 2, 2**53 + 1]), torch.tensor([], dtype=torch.int64)]),
        "logprobs": nest([torch.tensor([-0.0, torch.nan, 3e38]), torch.tensor([])]).to(torch.bfloat16),
        "input_lengths": torch.tensor([3, 0]),
        "truncated": torch.tensor([True, False]),
        "features": torch.randn(2, 3, 2),
    }
    tags = [{"input_lengths": 3, "source_id": "x\u2028"}, {"input_lengths": 0, "reward": 0.1}]
    client.put_samples(["a", "b"], "train", TensorDict(fields, [2]), tags)
    client.put_samples(["b"], "train", TensorDict({"values": torch.ones(1)}, [1]))
    assert export_rows(client, ["b", "a"], "train", tmp_path / "rows").fields == list(fields)
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == ["rows.json", "rows.safetensors"]

    other = make_client()
    meta = import_rows(other, tmp_path / "rows")
    assert (meta.partition_id, meta.sample_ids, meta.tags) == ("train", ["b", "a"], tags[::-1])
    back = other.get_samples(["a", "b"], "train", list(fields))
    for name, column in fields.items():
        for got, row in zip(back.get(name).unbind(), column.unbind(), strict=True):
            assert (got.dtype, got.shape) == (row.dtype, row.shape), name
            assert torch.equal(got.view(-1).view(torch.uint8), row.contiguous().view(-1).view(torch.uint8)), name


def test_no_rows_and_tags_alone(tmp_path: Path) -> None:
    client = make_client()
    export_rows(client, [], "train", tmp_path)
    assert import_rows(client, tmp_path).sample_ids == []
    client.put_samples(["a"], "train", tags=[{"k": 1}])
    export_rows(client, ["a"], "train", tmp_path)
    other = make_client()
    other.register_partition("resumed", [], 1, [])
    assert import_rows(other, tmp_path, partition_id="resumed").tags == [{"k": 1}]
    assert other.list_sample_ids("resumed") == ["a"]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rows\.json there"):
        import_rows(make_client(), tmp_path)
    export_rows(make_client(), [], "train", tmp_path)
    described = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps({**described, "format": 9}))
    with pytest.raises(UserError, match="format 9, this version reads 1"):
        import_rows(make_client(), tmp_path)
    with pytest.raises(KeyError, match="no rows"):
        export_rows(make_client(), ["a"], "train", tmp_path)
    with pytest.raises(NotImplementedError, match="does not describe rows"):
        export_rows(LocalDataPlaneClient(LocalDataPlaneConfig()), ["a"], "train", tmp_path)
