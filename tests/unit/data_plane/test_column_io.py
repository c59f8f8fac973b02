"""First write, later columns and reads, through the store by reference and through one that copies."""

import pytest
import torch

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, round_up, write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta, LocalDataPlaneConfig

IDS = ["a", "b", "c"]
LENGTHS = [3, 5, 2]
FIELDS = ["input_ids", "input_lengths", "token_mask", "sample_mask"]


def make_batch() -> dict[str, torch.Tensor]:
    """Rows padded to 5; what lies behind a row's end is 0."""
    inside = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": (torch.arange(15).reshape(3, 5) + 1) * inside,
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": inside.float(),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
    }


@pytest.fixture(params=["local", "noop"])
def client(request: pytest.FixtureRequest) -> DataPlaneClient:
    made = LocalDataPlaneClient(LocalDataPlaneConfig()) if request.param == "local" else NoOpDataPlaneClient()
    made.register_partition("p", [*FIELDS, "values"], 3, ["train"])
    return made


def test_round_up() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert round_up(7, 1) == 7


def test_written_rows_come_back_padded(client: DataPlaneClient) -> None:
    batch = make_batch()
    meta = kv_first_write(
        batch,
        sample_ids=IDS,
        dp_client=client,
        partition_id="p",
        extra_info={"step": 3},
        pad_to_multiple=8,
        tags=[{"source_id": name} for name in IDS],
    )
    assert (meta.task_name, meta.sample_ids, meta.sequence_lengths) == ("train", IDS, LENGTHS)
    assert meta.extra_info["pad_to_multiple"] == 8
    assert meta.extra_info["step"] == 3
    assert meta.tags == [{"source_id": name} for name in IDS]
    back = read_columns(client, meta)
    assert sorted(back) == sorted(FIELDS)
    for name, column in batch.items():
        assert torch.equal(back[name], column), name
    meta.extra_info["global_forward_pad_seqlen"] = 8
    wide = read_columns(client, meta, select_fields=["input_ids"], pad_value_dict={"input_ids": -1})
    assert wide["input_ids"].shape == (3, 8)
    assert wide["input_ids"][:, 5:].eq(-1).all()
    assert torch.equal(wide["input_ids"][1, :5], batch["input_ids"][1])


def test_the_local_plane_hands_over_the_very_tensor() -> None:
    client, batch = LocalDataPlaneClient(LocalDataPlaneConfig()), make_batch()
    client.register_partition("p", FIELDS, 3, ["train"])
    meta = kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="p")
    assert "pad_to_multiple" not in meta.extra_info
    back = read_columns(client, meta)
    for name, column in batch.items():
        assert back[name].data_ptr() == column.data_ptr(), name


def test_later_columns_are_cut_to_their_rows() -> None:
    client = NoOpDataPlaneClient()
    client.register_partition("p", FIELDS, 3, ["train"])
    meta = kv_first_write(make_batch(), sample_ids=IDS, dp_client=client, partition_id="p")
    values = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    write_columns(client, meta, fields={"values": values})
    stored = client.get_samples(["c", "b"], "p", ["values"])["values"].unbind()
    assert torch.equal(stored[0], values[2, :2])
    assert torch.equal(stored[1], values[1, :5])
    write_columns(client, meta, fields={})
    write_columns(client, meta.subset([]), fields={"values": values[:0]})
    with pytest.raises(ValueError, match="row 1 has 5 tokens in a column of width 4"):
        write_columns(client, meta, fields={"values": values[:, :4]})
    with pytest.raises(ValueError, match="need sequence_lengths"):
        write_columns(client, KVBatchMeta("p", None, IDS), fields={"values": values})


def test_first_write_refusals(client: DataPlaneClient) -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="3 rows for 2 sample ids"):
        kv_first_write(batch, sample_ids=IDS[:2], dp_client=client, partition_id="p")
    with pytest.raises(ValueError, match="needs the column 'input_lengths'"):
        kv_first_write({"input_ids": batch["input_ids"]}, sample_ids=IDS, dp_client=client, partition_id="p")
    with pytest.raises(TypeError, match="'text' is a str"):
        kv_first_write({**batch, "text": "abc"}, sample_ids=IDS, dp_client=client, partition_id="p")
