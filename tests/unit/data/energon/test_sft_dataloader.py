"""Passes, fillers, dropped rows and resume of the loaders, against plain lists of row ids.

Not covered: a loader process that dies; the numbers in the rows (tests of `nemo_rl.data.tokenize`) beyond one example.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.config import DataConfig
from nemo_rl.data.energon.replica import ReplicaLoaders
from nemo_rl.data.energon.sft_dataloader import build_energon_sft_loader
from nemo_rl.data.energon.sft_types import LoadedBatch
from nemo_rl.data.energon.sources import prepare_source
from nemo_rl.utils.errors import RunError, UserError

from .conftest import loaders, write_rows

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def ids(batch: LoadedBatch) -> list[str]:
    return [row.source_id for row in batch.rows]


def flat(parts: Iterable[list[str]]) -> list[str]:
    return [item for part in parts for item in part]


def take(source: ReplicaLoaders, steps: int) -> list[LoadedBatch]:
    return [source.next_train() for _ in range(steps)]


def through_json(states: object) -> dict[int, dict]:
    """What a checkpoint keeps of the states, read back."""
    return {int(shard): state for shard, state in json.loads(json.dumps(states)).items()}


def test_rows_are_the_tokens_of_the_conversation(tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path]):
    source = loaders(tokenizer, case("b01_three_turns.jsonl"), rows_per_shard=1)
    (row,) = source.next_train().rows
    assert (row.shard, row.weight, len(row.input_ids), str(row.input_ids.dtype)) == (0, 1.0, 95, "int64")
    assert list(row.token_mask.nonzero()[0]) == [*range(51, 57), *range(87, 94)]
    assert row.token_mask.dtype == "uint8"
    source.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_each_row_once_a_pass_in_a_new_order(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, processes: int):
    path = write_rows(tmp_path / "rows.jsonl", 24)
    source = loaders(tokenizer, path, energon={"num_workers": processes})
    batches = take(source, 18)
    source.close()
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2] * 6
    passes = [flat(ids(batch) for batch in batches[start : start + 6]) for start in (0, 6, 12)]
    expected = {f"rows.jsonl:{line}" for line in range(24)}
    assert all(set(one) == expected and len(one) == 24 for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert passes[0] != sorted(passes[0])
    assert all(batch.dropped == {} for batch in batches)


def test_order_follows_the_seed_and_nothing_else(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 24)

    def order(**options: object) -> list[list[str]]:
        source = loaders(tokenizer, path, **options)
        taken = [ids(batch) for batch in take(source, 12)]
        source.close()
        return taken

    assert order() == order() == order(energon={"num_workers": 1}) == order(energon={"prefetch_factor": 7})
    assert order() != order(seed=1)
    assert order(seed=1) == order(energon={"seed_offset": 1})
    assert order(seed=1)[:6] != order()[6:]
    in_order = order(data={"shuffle": False})
    assert flat(in_order) == [f"rows.jsonl:{line}" for line in range(24)] * 2


def test_a_large_source_is_read_in_slices(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 200)
    source = loaders(tokenizer, path, rows_per_shard=50, energon={"max_samples_per_sequence": 10})
    lines = [int(name.split(":")[1]) for batch in take(source, 4) for name in ids(batch)]
    source.close()
    assert sorted(lines) == list(range(200))
    # Within a slice the order of the file is kept.
    for start in range(0, 200, 10):
        slice_lines = [line for line in lines if start <= line < start + 10]
        assert slice_lines == sorted(slice_lines)
    assert lines != sorted(lines)


@pytest.mark.parametrize(("processes", "shards"), [(0, (0, 1)), (1, (0,))])
def test_resume_after_every_step_of_two_passes(
    tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path], processes: int, shards: tuple[int, ...]
):
    """B-15. Cut after each step; the state goes through JSON. Odd cuts also save again at once."""
    path = case("b14_twentyfour_rows.jsonl")
    options = {
        "shards": shards,
        "num_shards": len(shards),
        "rows_per_shard": 4 // len(shards),
        "energon": {"num_workers": processes},
    }
    straight = loaders(tokenizer, path, **options)
    batches = take(straight, 13)
    straight.close()
    expected = [(batch.epoch, ids(batch)) for batch in batches]
    assert sorted(flat(names for _, names in expected[:6]), key=int) == [str(row) for row in range(24)]
    for cut in range(1, 13):
        states = through_json(batches[cut - 1].states)
        resumed = loaders(tokenizer, path, restored=states, **options)
        if cut % 2:
            again = {shard: loader.state_dict() for shard, loader in zip(shards, resumed._train, strict=True)}
            assert again == states
        steps = 13 - cut if processes == 0 else 1
        after = [(batch.epoch, ids(batch)) for batch in take(resumed, steps)]
        resumed.close()
        assert after == expected[cut : cut + steps], f"cut after step {cut}"


def test_resume_may_change_the_number_of_loader_processes(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 24)
    straight = loaders(tokenizer, path)
    expected = [ids(batch) for batch in take(straight, 12)]
    straight.close()
    states = None
    for step, processes in enumerate([0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1]):
        # A loader process keeps its inner state for a minute: what follows is counted and skipped.
        source = loaders(tokenizer, path, restored=states, energon={"num_workers": processes, "prefetch_factor": 3})
        batch = source.next_train()
        source.close()
        assert ids(batch) == expected[step], f"step {step}"
        states = through_json(batch.states)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_b14_elastic_shards_give_the_same_rows_on_any_number_of_replicas(
    tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path], replicas: int
):
    path = case("b14_twentyfour_rows.jsonl")

    def run(world: int, steps: int, restored: dict | None) -> tuple[list[list[str]], dict]:
        taken, states = [[] for _ in range(steps)], {}
        for rank in range(world):
            shards = tuple(range(rank * 4 // world, (rank + 1) * 4 // world))
            source = loaders(tokenizer, path, shards=shards, num_shards=4, rows_per_shard=1, restored=restored)
            for step, batch in enumerate(take(source, steps)):
                taken[step] += ids(batch)
            states.update(batch.states)
            source.close()
        return taken, through_json(states)

    expected, _ = run(1, 6, None)
    first, states = run(2, 2, None)
    rest, _ = run(replicas, 4, states)
    assert first + rest == expected
    assert sorted(flat(expected), key=int) == [str(row) for row in range(24)]


@pytest.mark.parametrize(
    ("processes", "rows", "shards", "per_shard", "steps"),
    [(0, 3, 2, 1, 2), (0, 3, 2, 4, 1), (0, 1, 4, 1, 1), (0, 10, 4, 2, 2), (1, 3, 2, 1, 2), (1, 1, 2, 1, 1)],
)
def test_b12_fewer_rows_than_places(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    processes: int,
    rows: int,
    shards: int,
    per_shard: int,
    steps: int,
):
    """Each row once a pass; fillers weigh nothing and make all shards take equally many steps."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    every = tuple(range(shards))
    source = loaders(
        tokenizer, path, shards=every, num_shards=shards, rows_per_shard=per_shard, energon={"num_workers": processes}
    )
    for epoch in range(2):
        batches = take(source, steps)
        assert {batch.epoch for batch in batches} == {epoch}
        real = [row for batch in batches for row in batch.rows if row.weight]
        fillers = [row for batch in batches for row in batch.rows if not row.weight]
        assert sorted(row.source_id for row in real) == [f"rows.jsonl:{line}" for line in range(rows)]
        assert len(fillers) == steps * shards * per_shard - rows
        assert all((len(row.input_ids), row.token_mask.sum(), row.source_id) == (2, 0, "") for row in fillers)
        assert [row.shard for batch in batches for row in batch.rows] == sorted(every * per_shard) * steps
    source.close()


@pytest.mark.parametrize("processes", [0, 4])
def test_b12_three_rows_on_two_replicas(
    tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path], processes: int
):
    """Global batch 2; four loader processes are taken as one."""
    path = case("b12_three_rows.jsonl")
    seen = []
    for shard in (0, 1):
        energon = {"num_workers": processes}
        source = loaders(tokenizer, path, shards=(shard,), num_shards=2, rows_per_shard=1, energon=energon)
        seen += [name for batch in take(source, 2) for name in ids(batch) if name]
        source.close()
    assert sorted(seen) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("policy", "lengths", "dropped"),
    [
        ("truncate", [30, 34, 50, 64], {"no_trained_token": 1}),
        ("drop", [30, 34, 50, 64], {"overlong": 1}),
        # Only the third piece of the long row, 22 tokens, has something to train.
        ("split", [22, 30, 34, 50, 64], {}),
    ],
)
def test_b08_rows_over_the_window(
    tokenizer: PreTrainedTokenizerBase,
    case: Callable[[str], Path],
    policy: str,
    lengths: list[int],
    dropped: dict[str, int],
):
    path = case("b08_lengths_30_150_50_64_34.jsonl")
    source = loaders(tokenizer, path, rows_per_shard=5, max_length=64, data={"overlong": policy})
    batch = source.next_train()
    source.close()
    assert sorted(len(row.input_ids) for row in batch.rows if row.weight) == lengths
    assert batch.dropped == dropped


def test_b08_fail_names_the_row_in_a_short_line(tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path]):
    path = case("b08_lengths_30_150_50_64_34.jsonl")
    source = loaders(tokenizer, path, rows_per_shard=5, max_length=64, data={"overlong": "fail"})
    with pytest.raises(UserError, match=r"jsonl:1 of .*: 150 tokens, 64 allowed") as error:
        source.next_train()
    source.close()
    assert len(str(error.value).replace(str(path), "")) < 200


def test_b08_a_row_of_no_token_is_left_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    """A template that shows only the words, and turns without any."""
    path = tmp_path / "rows.jsonl"
    empty = {"messages": [{**USER, "content": ""}, {**ANSWER, "content": ""}]}
    path.write_text("\n".join(map(json.dumps, [{"messages": [USER, ANSWER]}, empty])))
    template, tokenizer.chat_template = tokenizer.chat_template, "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        source = loaders(tokenizer, path, rows_per_shard=2)
        batch = source.next_train()
        source.close()
    finally:
        tokenizer.chat_template = template
    assert batch.dropped == {"empty": 1}
    assert [row.source_id for row in batch.rows if row.weight] == ["rows.jsonl:0"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "cook_error"),
        ([{"role": "system", "content": "s"}], "no_trained_token"),
        ([USER], "no_trained_token"),
        ([USER, {"role": "assistant", "content": None}], "cook_error"),
        ([USER, {"role": "assistant"}], "cook_error"),
        ([ANSWER, USER], None),
        ([ANSWER], None),
        ([USER, ANSWER, USER], None),
    ],
)
def test_odd_rows_follow_one_rule_each(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, messages: list[dict], reason: str | None
):
    """Beside a good row, which is read in any case: rows read = rows trained + rows dropped."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": one}) for one in ([USER, ANSWER], messages)))
    source = loaders(tokenizer, path, rows_per_shard=2)
    batch = source.next_train()
    source.close()
    assert batch.dropped == ({} if reason is None else {reason: 1})
    real = [row for row in batch.rows if row.weight]
    assert len(real) + sum(batch.dropped.values()) == 2
    assert {int(row.token_mask.sum()) for row in real} == {2}


def test_b06_final_turn_behind_the_window(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    """The first answer is inside, but with the last turn only nothing is left to train."""
    path = tmp_path / "rows.jsonl"
    turns = [USER, ANSWER, {"role": "user", "content": "x" * 40}, ANSWER]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in (turns, [USER, ANSWER])))
    config = DataConfig.model_validate({"train": {"path": str(path)}})
    for final, dropped in ((False, {}), (True, {"no_trained_token": 1})):
        loader = build_energon_sft_loader(
            data_config=config,
            prepared=prepare_source(config.train),
            tokenizer=tokenizer,
            batch_size=2,
            max_sequence_length=40,
            split_role="train",
            shard=0,
            num_logical_shards=1,
            only_unmask_final=final,
            seed=0,
        )
        batch = next(loader)
        loader.close()
        assert batch.dropped == dropped
        assert sum(int(row.token_mask.sum()) for row in batch.rows) == (2 if final else 4)


def write_mixed(path: Path) -> Path:
    """12 lines: 4 good ones without trouble, 1 over 40 tokens, and each way to be left out at cook or encode."""
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": "x" * 60}, ANSWER]},
        {"messages": []},
        {"question": "q", "answer": "a"},
        {"text": "?"},
        {"messages": [USER, {"role": "assistant", "content": "y" * 60}]},
        {"messages": [USER, {"role": "assistant", "content": "\ud800"}]},
        {"messages": [USER, ANSWER]},
        {"messages": [{"role": "alien", "content": "?"}]},
        {"prompt": "q", "completion": "a"},
    ]
    path.write_text("\n".join(["{", *map(json.dumps, rows)]))
    return path


def test_dropped_rows_are_replaced_and_counted_once(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    """11 usable lines, 5 usable rows: batches of 2 are full until the rows end, also when resumed after each step."""
    path = write_mixed(tmp_path / "mixed.jsonl")
    source = loaders(tokenizer, path, rows_per_shard=2, max_length=40)
    batches = take(source, 12)
    source.close()
    kept = sorted(f"mixed.jsonl:{line}" for line in (1, 5, 7, 9, 11))
    for start in (0, 6):
        one_pass = batches[start : start + 6]
        assert sorted(name for batch in one_pass for name in ids(batch) if name) == kept
        assert [sum(1 for name in ids(batch) if name) for batch in one_pass] == [2, 2, 1, 0, 0, 0]
        totals: dict[str, int] = {}
        for batch in one_pass:
            for reason, count in batch.dropped.items():
                totals[reason] = totals.get(reason, 0) + count
        assert totals == {"no_trained_token": 2, "cook_error": 3, "encode_error": 1}
    for cut in range(1, 12):
        restored = through_json(batches[cut - 1].states)
        resumed = loaders(tokenizer, path, rows_per_shard=2, max_length=40, restored=restored)
        after = [(ids(batch), batch.dropped) for batch in take(resumed, 12 - cut)]
        resumed.close()
        assert after == [(ids(batch), batch.dropped) for batch in batches[cut:]]


def test_b06_a_prompt_that_fills_the_window_is_dropped(tokenizer: PreTrainedTokenizerBase, case: Callable[[str], Path]):
    source = loaders(tokenizer, case("b06_prompt_fills_window.jsonl"), rows_per_shard=3, max_length=40)
    batch = source.next_train()
    source.close()
    assert batch.dropped == {"no_trained_token": 1}
    assert sum(int(row.token_mask.sum()) for row in batch.rows) == 7
    assert sorted(len(row.input_ids) for row in batch.rows) == [2, 29, 31]


def test_overlong_rows_follow_the_policy(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_mixed(tmp_path / "mixed.jsonl")
    source = loaders(tokenizer, path, rows_per_shard=11, max_length=40, data={"overlong": "drop"})
    assert source.next_train().dropped == {"overlong": 2, "no_trained_token": 1, "cook_error": 3, "encode_error": 1}
    source.close()
    source = loaders(tokenizer, path, rows_per_shard=11, max_length=40, data={"overlong": "fail"})
    with pytest.raises(UserError, match=r"row mixed.jsonl:[37] of .*mixed.jsonl: .*40 allowed.*data.overlong: fail"):
        source.next_train()
    source.close()


def test_many_bad_rows_end_the_run_naming_the_last(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "?"}\n' * 30)
    source = loaders(tokenizer, path, rows_per_shard=4, energon={"max_consecutive_bad_rows": 9})
    said = r"row bad.jsonl:\d+ of .*bad.jsonl is the last of 9 unusable rows in a row: cook_error: row has no field"
    with pytest.raises(UserError, match=said):
        source.next_train()
    source.close()
    assert capfd.readouterr() == ("", "")
    # A whole pass without a usable row is enough, except for a shard of a few rows beside others.
    path.write_text('{"text": "?"}\n' * 3)
    source = loaders(tokenizer, path, rows_per_shard=2)
    with pytest.raises(UserError, match="is the last of 3 unusable rows"):
        source.next_train()
    source.close()
    source = loaders(tokenizer, path, rows_per_shard=2, shards=(0, 1), num_shards=2)
    assert [batch.dropped for batch in take(source, 20)] == [{"cook_error": 3}] * 20
    source.close()


def test_a_state_of_other_data_or_settings_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, case: Callable[[str], Path]
):
    """B-16: the message lists old and new value of what changed."""
    path = write_rows(tmp_path / "rows.jsonl", 24)
    source = loaders(tokenizer, path)
    states = through_json(source.next_train().states)
    source.close()

    def refusal(path: Path, **options: object) -> str:
        with pytest.raises(UserError) as error:
            loaders(tokenizer, path, restored=states, **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "rows_per_shard 4 -> 2" in refusal(path, rows_per_shard=2)
    assert "max_sequence_length 256 -> 128" in refusal(path, max_length=128)
    assert "shuffle True -> False" in refusal(path, data={"shuffle": False})
    assert "seed 0 -> 5" in refusal(path, seed=5)
    assert "num_shards 1 -> 2" in refusal(path, num_shards=2)
    assert "add_eos False -> True" in refusal(path, data={"add_eos": True})
    cookers = [{"options": {"system_prompt": "s"}}]
    assert "cookers" in refusal(path, energon={"cookers": cookers})
    other = refusal(case("b12_three_rows.jsonl"))
    assert "data.name 'rows.jsonl' -> 'b12_three_rows.jsonl'" in other
    assert "data.rows 24 -> 3" in other
    write_rows(path, 24, start=10)
    assert "data.digest" in refusal(path)
    assert "no loader state for shard 1, only for [0]" in refusal(path, shards=(1,), num_shards=2)


def test_a_state_allows_other_speed_settings_and_another_folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 24)
    source = loaders(tokenizer, path)
    first, second = take(source, 2)
    source.close()
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / "rows.jsonl")
    energon = {"num_workers": 8, "prefetch_factor": 5, "checkpoint_every_sec": 1.0, "watchdog_timeout_seconds": 9}
    resumed = loaders(tokenizer, moved, restored=through_json(first.states), energon=energon)
    assert ids(resumed.next_train()) == ids(second)
    resumed.close()


def test_states_of_different_steps_are_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", 24)
    source = loaders(tokenizer, path, shards=(0, 1), num_shards=2, rows_per_shard=2)
    one, two = (through_json(batch.states) for batch in take(source, 2))
    source.close()
    with pytest.raises(UserError, match=r"different steps.*\(0, 1\), \(0, 2\)"):
        loaders(tokenizer, path, shards=(0, 1), num_shards=2, rows_per_shard=2, restored={0: one[0], 1: two[1]})


def test_restoring_after_the_first_batch_is_a_mistake_of_the_caller(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    source = loaders(tokenizer, write_rows(tmp_path / "rows.jsonl", 4))
    batch = source.next_train()
    with pytest.raises(RuntimeError, match="before the first batch"):
        source._train[0].load_state_dict(batch.states[0])
    source.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reader_that_fails_ends_with_one_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
):
    from nemo_rl.data.energon.index import JsonlReader

    def fail(self: JsonlReader, row: int) -> None:
        raise OSError(f"disk gone\nat row {row}")

    monkeypatch.setattr(JsonlReader, "__getitem__", fail)
    source = loaders(tokenizer, write_rows(tmp_path / "rows.jsonl", 4), energon={"num_workers": processes})
    with pytest.raises(RunError, match=r"rows.jsonl: reading shard 0 failed: OSError: at row \d"):
        source.next_train()
    source.close()
