"""What a controller may do with the plane, and the counters of its process. A fake of the plane is enough here; the
functional test of the queue does the same with a controller process of its own."""

import asyncio
import time

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.adapters.event_loop import EventLoopThread, UnansweredError
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.control import ControlOnlyClient
from nemo_rl.data_plane.observability import DataPlaneEvent, MetricsDataPlaneClient
from nemo_rl.data_plane.traffic import ColumnTraffic


def test_metadata_passes_and_columns_do_not() -> None:
    plane = NoOpDataPlaneClient()
    control = ControlOnlyClient(plane)
    control.register_partition("train", ["x"], 2, ["step"])
    rows = TensorDict({"x": torch.ones(2)}, [2])
    plane.put_samples(["a", "b"], "train", rows)
    assert control.put_samples(["a"], "train", tags=[{"weight_version": 3}]).tags == [{"weight_version": 3}]
    assert control.list_sample_ids("train") == ["a", "b"]
    meta = control.claim_meta("train", "step", ["x"], 2)
    assert control.check_consumption_status("train", ["step"])
    assert control.get_meta(["b"], "train").fields == ["x"]
    refused = r"moves metadata only: it may not {} columns \['x'\] of partition 'train'"
    with pytest.raises(RuntimeError, match=refused.format("read")):
        control.get_data(meta)
    with pytest.raises(RuntimeError, match=refused.format("read")):
        control.get_samples(["a"], "train", ["x"])
    with pytest.raises(RuntimeError, match=refused.format("write")):
        control.put_samples(["a", "b"], "train", rows)
    control.finish_partition("train")
    control.clear_samples(["a"], "train")
    assert plane.list_sample_ids("train") == ["b"]
    control.clear_samples(None, "train")
    assert not control.supports_checkpointing()
    control.close()


def test_counted_calls_reach_the_plane() -> None:
    events: list[DataPlaneEvent] = []
    client = MetricsDataPlaneClient(NoOpDataPlaneClient(), events.append)
    client.register_partition("train", ["x"], 8, ["step"])
    client.put_samples(["a"], "train", TensorDict({"x": torch.ones(1, 3)}, [1]))
    client.finish_partition("train")
    assert client.claim_meta("train", "step", ["x"], 8).sample_ids == client.get_meta(["a"], "train").sample_ids
    assert [event["op"] for event in events] == ["register", "put", "finish", "claim", "meta"]
    assert client.snapshot()["max_bytes_per_key_seen"] == 12


def test_traffic() -> None:
    traffic = ColumnTraffic()
    traffic.add(written=3)
    traffic.add(read=4, written=1)
    assert traffic.snapshot() == {"bytes_written": 4, "bytes_read": 4}


def test_the_event_loop_thread_bounds_each_call() -> None:
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def fail() -> None:
        raise TimeoutError("its own")

    loop = EventLoopThread("test")
    assert loop.run(wait(0), timeout_s=5) == "done"
    start = time.monotonic()
    with pytest.raises(UnansweredError, match=r"within 0\.1 s"):
        loop.run(wait(60), timeout_s=0.1)
    with pytest.raises(TimeoutError, match="its own") as caught:
        loop.run(fail(), timeout_s=5)
    assert not isinstance(caught.value, UnansweredError)
    assert time.monotonic() - start < 3
    assert loop.close() and loop.close()
