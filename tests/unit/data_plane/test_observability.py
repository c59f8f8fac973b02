"""Counters against sums made by hand, and that the measured client behaves as the one inside."""

import pytest
import torch

from nemo_rl.data_plane.adapters.local import LocalDataPlaneClient
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.codec import nest, to_tensordict
from nemo_rl.data_plane.interfaces import LocalDataPlaneConfig
from nemo_rl.data_plane.observability import DataPlaneEvent, MetricsDataPlaneClient, column_bytes


def test_bytes_of_each_row_are_exact() -> None:
    td = to_tensordict(
        {
            "ids": nest([torch.arange(3), torch.arange(1)]),
            "mask": torch.ones(2, 4, dtype=torch.bfloat16),
            "text": ["long text", ""],
        },
        batch_size=2,
    )
    assert column_bytes(td) == {"ids": [24, 8], "mask": [8, 8]}


def test_counters_follow_writes_rewrites_and_clears() -> None:
    events: list[DataPlaneEvent] = []
    client = MetricsDataPlaneClient(NoOpDataPlaneClient(), on_event=events.append)
    client.register_partition("p", ["ids"], 2, ["train"])
    td = to_tensordict({"ids": nest([torch.arange(3), torch.arange(1)])}, batch_size=2)
    for _ in range(2):  # a rewrite replaces, it does not add
        client.put_samples(["a", "b"], "p", fields=td)
    client.get_samples(["a"], "p", ["ids"])
    assert client.bytes_outstanding_by_partition() == {"p": 32}
    client.clear_samples(["a"], "p")
    assert client.snapshot() == {
        "total_bytes": 32 + 32 + 24,
        "total_keys": 2 + 2 + 1 + 1,
        "total_ops": 5,
        "bytes_outstanding": 8,
        "peak_bytes_outstanding": 32,
        "max_bytes_per_key_seen": 24,
        "last_put_bytes_per_key": 16,
        "n_keys_outstanding": 1,
    }
    with pytest.raises(KeyError):
        client.get_samples(["a"], "p", ["ids"])
    with pytest.raises(TimeoutError):
        client.claim_meta("p", "train", ["ids"], 2, timeout_s=0.01)
    assert [(event["op"], event["status"]) for event in events[-2:]] == [("get", "error"), ("claim", "timeout")]
    assert client.snapshot()["total_ops"] == 5
    client.clear_samples(None, "p")
    assert client.snapshot()["n_keys_outstanding"] == 0
    assert all(event["wall_ms"] >= 0 for event in events)


def test_every_call_reaches_the_client_inside() -> None:
    client = MetricsDataPlaneClient(LocalDataPlaneClient(LocalDataPlaneConfig()))
    assert client.process_local
    assert not client.supports_checkpointing()
    client.register_partition("p", ["ids"], 2, ["train"])
    ids = torch.arange(6).reshape(2, 3)
    meta = client.put_samples(["a", "b"], "p", fields=to_tensordict({"ids": ids}, batch_size=2))
    assert client.get_data(meta)["ids"].data_ptr() == ids.data_ptr()
    assert client.claim_meta("p", "train", ["ids"], 2).sample_ids == ["a", "b"]
    assert client.check_consumption_status("p", ["train"])
    assert client.list_sample_ids("p") == ["a", "b"]
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.list_sample_ids("p")
