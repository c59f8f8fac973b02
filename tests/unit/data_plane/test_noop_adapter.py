"""The reference store: the contract of `DataPlaneClient` that a queue shared by processes has to keep as well."""

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.data_plane.codec import nest, to_tensordict


def make_client() -> NoOpDataPlaneClient:
    client = NoOpDataPlaneClient()
    client.register_partition("train", ["input_ids", "values"], 8, ["prev_lp", "train"])
    return client


def rows_of(*values: int) -> TensorDict:
    return TensorDict({"input_ids": torch.tensor(values)}, [len(values)])


def test_b28_clear_read_and_put_again() -> None:
    client = make_client()
    client.put_samples(list("abcd"), "train", fields=rows_of(1, 2, 3, 4))
    client.clear_samples(["b"], "train")
    client.clear_samples(["b"], "train")
    with pytest.raises(KeyError, match=r"'train' has no column 'input_ids' for rows \['b'\]"):
        client.get_samples(["a", "b", "c"], "train", ["input_ids"])
    client.clear_samples(None, "nope")
    client.put_samples(["b"], "train", fields=rows_of(20))
    assert client.get_samples(["b"], "train", ["input_ids"])["input_ids"].tolist() == [20]
    assert client.get_samples(["d", "a"], "train", ["input_ids"])["input_ids"].tolist() == [4, 1]
    assert client.list_sample_ids("train") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("lengths", [[3, 3], [3, 5], [3, 0]])
def test_b29_kind_and_content_do_not_depend_on_the_lengths(lengths: list[int]) -> None:
    client = make_client()
    rows = [torch.arange(n) for n in lengths]
    td = TensorDict({"input_ids": nest(rows), "flag": torch.tensor([True, False])}, [2])
    client.put_samples(["a", "b"], "train", fields=td)
    back = client.get_samples(["b", "a"], "train", ["input_ids", "flag"])
    assert back["input_ids"].is_nested
    assert [row.tolist() for row in back["input_ids"].unbind()] == [rows[1].tolist(), rows[0].tolist()]
    assert back["flag"].tolist() == [False, True]
    with pytest.raises(ValueError, match="'input_ids' is jagged already"):
        client.put_samples(["a"], "train", fields=rows_of(1))


def test_b30_a_wait_ends_and_says_what_is_missing() -> None:
    client = make_client()
    client.put_samples(list("abcdef"), "train", fields=rows_of(1, 2, 3, 4, 5, 6))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'train', task 'train': 6 of 8 rows have \['input_ids'\]"):
        client.claim_meta("train", "train", ["input_ids"], 8, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"0 of 6 rows .* nobody wrote: \['values'\]"):
        client.claim_meta("train", "train", ["values"], 6, timeout_s=0.2)
    assert time.monotonic() - start < 5
    assert client.claim_meta("train", "train", ["values"], 6, blocking=False).size == 0


def test_b30_a_consumer_ends_with_its_producers() -> None:
    client = make_client()
    client.put_samples(list("abcdefg"), "train", fields=rows_of(*range(7)))
    late = threading.Timer(0.1, lambda: client.finish_partition("train"))
    late.start()
    assert client.claim_meta("train", "train", ["input_ids"], 8, timeout_s=10).sample_ids == list("abcdefg")
    late.join()
    assert client.claim_meta("train", "train", ["input_ids"], 8, timeout_s=10).size == 0
    assert client.check_consumption_status("train", ["train"])
    with pytest.raises(TimeoutError, match="nobody wrote"):
        client.claim_meta("train", "prev_lp", ["values"], 8, timeout_s=0.1)


def test_what_is_known_of_rows() -> None:
    client = make_client()
    client.put_samples(["a", "b"], "train", fields=rows_of(1, 2), tags=[{"input_lengths": 4}, {"input_lengths": 5}])
    client.put_samples(["b"], "train", fields=TensorDict({"values": torch.ones(1)}, [1]))
    both, one = client.get_meta(["b", "a"], "train"), client.get_meta(["b"], "train")
    assert (both.fields, both.sequence_lengths, one.fields) == (["input_ids"], [5, 4], ["input_ids", "values"])
    with pytest.raises(KeyError, match=r"'train' has no rows \['c'\]"):
        client.get_meta(["c"], "train")


def test_claims_wait_for_a_producer_and_never_repeat_a_row() -> None:
    client = make_client()
    client.put_samples(["a", "b"], "train", fields=rows_of(1, 2), tags=[{"input_lengths": 4}, {"input_lengths": 5}])
    late = threading.Timer(0.1, lambda: client.put_samples(["c"], "train", fields=rows_of(3)))
    late.start()
    first = client.claim_meta("train", "train", ["input_ids"], 2)
    assert (first.sample_ids, first.sequence_lengths) == (["a", "b"], [4, 5])
    assert client.claim_meta("train", "train", ["input_ids"], 1, timeout_s=10).sample_ids == ["c"]
    late.join()
    assert client.claim_meta("train", "prev_lp", ["input_ids"], 3).sample_ids == ["a", "b", "c"]
    assert not client.check_consumption_status("train", ["train"])
    with pytest.raises(KeyError, match="no task 'other'"):
        client.claim_meta("train", "other", ["input_ids"], 1)


def test_writes_and_reads_are_copies_of_tensors_only() -> None:
    client, values = make_client(), torch.tensor([1.0, 2.0])
    client.put_samples(["a", "b"], "train", fields=TensorDict({"x": values}, [2]))
    values.zero_()
    client.get_samples(["a"], "train", ["x"])["x"].zero_()
    assert client.get_samples(["a", "b"], "train", ["x"])["x"].tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="tensors only"):
        client.put_samples(["a"], "train", fields=to_tensordict({"text": ["x"]}, batch_size=1))
    with pytest.raises(ValueError, match="neither columns nor tags"):
        client.put_samples(["a"], "train")
    with pytest.raises(ValueError, match="2 rows for 1 sample ids"):
        client.put_samples(["a"], "train", fields=rows_of(1, 2))
