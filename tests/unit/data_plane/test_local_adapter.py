"""The local plane: bounds, write-once, generations, and sharing without copies. One process, as it is used."""

import threading

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient, is_local_batch_meta
from nemo_rl.data_plane.codec import to_nested_by_length, to_tensordict
from nemo_rl.data_plane.interfaces import KVBatchMeta, LocalDataPlaneConfig

IDS = ["a", "b", "c", "d"]
FIELDS = ["input_ids", "input_lengths", "text"]


def make_columns() -> dict:
    return {
        "input_ids": torch.arange(24).reshape(4, 6),
        "input_lengths": torch.tensor([6, 2, 5, 3]),
        "text": [["w"], ["x"], ["y"], ["z"]],
    }


def make_client(max_partitions: int = 2) -> LocalDataPlaneClient:
    client = LocalDataPlaneClient(LocalDataPlaneConfig(max_partitions=max_partitions))
    client.register_partition("p", FIELDS, 4, ["train", "eval"])
    return client


def fill(client: LocalDataPlaneClient, columns: dict | None = None) -> KVBatchMeta:
    td = to_tensordict(columns or make_columns(), batch_size=4)
    return client.put_samples(IDS, "p", fields=td, tags=[{"source_id": f"s{i}"} for i in range(4)])


def test_put_returns_a_complete_meta() -> None:
    meta = fill(make_client())
    assert meta == KVBatchMeta(
        partition_id="p",
        task_name=None,
        sample_ids=IDS,
        fields=FIELDS,
        sequence_lengths=[6, 2, 5, 3],
        extra_info={"local_partition_generation": 1},
        tags=[{"source_id": f"s{i}"} for i in range(4)],
    )
    assert is_local_batch_meta(meta)
    assert not is_local_batch_meta(KVBatchMeta("p", None, IDS))


def test_whole_batches_are_shared_and_ranges_are_views() -> None:
    client, columns = make_client(), make_columns()
    meta = fill(client, columns)
    whole = client.get_data(meta)
    assert whole["input_ids"].data_ptr() == columns["input_ids"].data_ptr()
    part = client.get_samples(["b", "c"], "p", ["input_ids"])["input_ids"]
    assert part.data_ptr() == columns["input_ids"][1].data_ptr()
    assert torch.equal(part, columns["input_ids"][1:3])
    gathered = client.get_samples(["d", "a"], "p", FIELDS)
    assert torch.equal(gathered["input_ids"], columns["input_ids"][[3, 0]])
    assert gathered.get("text").tolist() == [["z"], ["w"]]


def test_a_column_changed_in_place_is_refused() -> None:
    client, columns = make_client(), make_columns()
    meta = fill(client, columns)
    client.get_samples(["b"], "p", ["input_ids"])["input_ids"].mul_(2)
    with pytest.raises(RuntimeError, match="'input_ids' of partition 'p' was changed in place"):
        client.get_data(meta, ["input_ids"])
    assert client.get_data(meta, ["input_lengths"])["input_lengths"].tolist() == [6, 2, 5, 3]
    columns["input_lengths"][0] = 0  # the writer is held to it as well
    with pytest.raises(RuntimeError, match="'input_lengths'"):
        client.get_data(meta, ["input_lengths"])


def test_readers_own_their_container_and_their_objects() -> None:
    client = make_client()
    meta = fill(client)
    rows = client.get_data(meta)
    rows.get("text").tolist()[0].append("changed")
    del rows["input_ids"]
    assert client.get_data(meta).get("text").tolist() == [["w"], ["x"], ["y"], ["z"]]
    assert "input_ids" in client.get_data(meta)


def test_stored_columns_hold_no_graph_and_may_be_jagged_or_of_inference_mode() -> None:
    client = make_client()
    with torch.inference_mode():
        lengths = torch.tensor([6, 2, 5, 3])
    weights = torch.ones(4, 6, requires_grad=True)
    jagged = to_nested_by_length((weights * 2).detach(), lengths)
    client.register_partition("q", ["x", "y", "input_lengths"], 4, [])
    td = TensorDict({"x": weights * 2, "y": jagged, "input_lengths": lengths}, batch_size=[4])
    meta = client.put_samples(IDS, "q", fields=td)
    assert not client.get_data(meta)["x"].requires_grad
    assert [len(row) for row in client.get_samples(["c", "a"], "q", ["y"])["y"].unbind()] == [5, 6]
    jagged.values().add_(1)
    with pytest.raises(RuntimeError, match="'y'"):
        client.get_data(meta, ["y"])


def test_every_task_has_its_own_cursor() -> None:
    client = make_client()
    assert not client.check_consumption_status("p", ["train"])
    fill(client)
    first = client.claim_meta("p", "train", ["input_ids"], 3)
    assert (first.task_name, first.sample_ids, first.fields) == ("train", ["a", "b", "c"], ["input_ids"])
    assert first.sequence_lengths == [6, 2, 5]
    assert not client.check_consumption_status("p", ["train"])
    assert client.claim_meta("p", "train", ["input_ids"], 3).sample_ids == ["d"]
    assert client.claim_meta("p", "train", ["input_ids"], 3).sample_ids == []
    assert client.check_consumption_status("p", ["train"])
    assert not client.check_consumption_status("p", ["train", "eval"])
    client.clear_samples(["b"], "p")
    assert client.claim_meta("p", "eval", ["input_ids"], 9).sample_ids == ["a", "c", "d"]


def test_places_are_bounded_and_freed_by_clearing() -> None:
    client = make_client(max_partitions=1)
    with pytest.raises(RuntimeError, match=r"no place for partition 'q': \['p'\].*data_plane.max_partitions is 1"):
        client.register_partition("q", ["x"], 1, [])
    meta = fill(client)
    client.clear_samples(["a", "b", "c"], "p")
    assert client.list_sample_ids("p") == ["d"]
    with pytest.raises(KeyError, match=r"no rows \['a', 'b', 'c'\]"):
        client.get_data(meta)
    client.clear_samples(["d"], "p")
    client.register_partition("q", ["x"], 1, [])
    client.clear_samples(None, "q")
    client.register_partition("q", ["x"], 1, [])


def test_a_stale_meta_never_reads_a_reused_name() -> None:
    client = make_client()
    stale = fill(client)
    client.clear_samples(None, "p")
    client.register_partition("p", FIELDS, 4, [])
    fresh = fill(client)
    with pytest.raises(ValueError, match="meta of generation 1 of partition 'p', which is at 2"):
        client.get_data(stale)
    with pytest.raises(ValueError, match="generation None"):
        client.get_data(KVBatchMeta("p", None, IDS, fields=["input_ids"]))
    assert torch.equal(client.get_data(fresh)["input_ids"], make_columns()["input_ids"])


def test_b28_clearing_twice_is_safe_and_cleared_rows_are_named() -> None:
    client = make_client()
    fill(client)
    client.clear_samples(["b"], "p")
    client.clear_samples(["b"], "p")
    with pytest.raises(KeyError, match=r"'p' has no rows \['b'\]"):
        client.get_samples(["a", "b", "c"], "p", ["input_ids"])
    client.clear_samples(None, "nope")
    assert client.list_sample_ids("nope") == []
    rows = client.get_samples(["d", "a"], "p", ["input_ids"])["input_ids"]
    assert torch.equal(rows, make_columns()["input_ids"][[3, 0]])


def test_refusals() -> None:
    client = make_client()
    td = to_tensordict(make_columns(), batch_size=4)
    with pytest.raises(KeyError, match=r"columns \['input_ids'\] of partition 'p' have not been written"):
        client.claim_meta("p", "train", ["input_ids"], 1)
    with pytest.raises(ValueError, match="exists already"):
        client.register_partition("p", ["x"], 1, [])
    with pytest.raises(ValueError, match="num_samples is 0"):
        client.register_partition("q", ["x"], 0, [])
    with pytest.raises(ValueError, match=r"column \['x'\] given more than once"):
        client.register_partition("q", ["x", "x"], 1, [])
    with pytest.raises(ValueError, match=r"task \['t'\] given more than once"):
        client.register_partition("q", ["x"], 1, ["t", "t"])
    with pytest.raises(KeyError, match="no partition 'q'"):
        client.put_samples(IDS, "q", fields=td)
    with pytest.raises(ValueError, match="neither columns nor tags"):
        client.put_samples(IDS, "p")
    with pytest.raises(ValueError, match=r"sample id \['a'\] given more than once"):
        client.put_samples(["a", "a", "b", "c"], "p", fields=td)
    with pytest.raises(ValueError, match="3 sample ids for 4 rows"):
        client.put_samples(IDS[:3], "p", fields=td)
    with pytest.raises(ValueError, match="1 tags for 4 rows"):
        client.put_samples(IDS, "p", fields=td, tags=[{}])
    with pytest.raises(ValueError, match="2 rows of columns for 4 rows"):
        client.put_samples(IDS, "p", fields=td[:2])
    with pytest.raises(ValueError, match=r"columns \['other'\] are not declared"):
        client.put_samples(IDS, "p", fields=TensorDict({"other": torch.ones(4)}, [4]))
    meta = fill(client)  # none of the refused writes left anything behind
    with pytest.raises(ValueError, match="written once"):
        client.put_samples(IDS, "p", fields=td)
    with pytest.raises(KeyError, match="no task 'other'"):
        client.claim_meta("p", "other", ["input_ids"], 1)
    with pytest.raises(ValueError, match="name the columns"):
        client.get_data(meta, [])
    with pytest.raises(ValueError, match="more than once"):
        client.get_samples(["a", "a"], "p", ["input_ids"])
    with pytest.raises(KeyError, match="values"):
        client.get_samples(["a"], "p", ["values"])
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get_data(meta)
    with pytest.raises(RuntimeError, match="closed"):
        client.list_sample_ids("p")


def test_one_writer_and_one_reader_thread() -> None:
    """300 batches through 2 places; every batch read must be the one its meta names."""
    client = LocalDataPlaneClient(LocalDataPlaneConfig(max_partitions=2))
    places, metas, failures = threading.Semaphore(2), [], []
    arrived = threading.Semaphore(0)

    def write() -> None:
        for n in range(300):
            places.acquire()
            name = f"p{n % 2}"
            client.register_partition(name, ["x"], 2, [])
            metas.append((n, client.put_samples(["a", "b"], name, fields=TensorDict({"x": torch.full((2,), n)}, [2]))))
            arrived.release()

    writer = threading.Thread(target=write)
    writer.start()
    for n in range(300):
        assert arrived.acquire(timeout=10)
        number, meta = metas[n]
        if client.get_data(meta)["x"].tolist() != [number, number]:
            failures.append(number)
        client.clear_samples(None, meta.partition_id)
        places.release()
    writer.join(10)
    assert not failures
