"""Finished groups as rows: every column of every row against the episode, tags, one put, and a put that fails."""

import pytest
import torch
from unit.experience.fakes import (
    CLOSE,
    PARTITION,
    SAMPLING,
    CountingClient,
    Reply,
    attempt_of,
    drive,
    logprob_of,
    make_manager,
    make_order,
    make_prompt,
)

from nemo_rl.data_plane.column_io import read_columns
from nemo_rl.data_plane.schema import ROLLOUT_FIELDS
from nemo_rl.environments.interfaces import EnvStep
from nemo_rl.experience.episode import Group
from nemo_rl.experience.group_writer import clear_groups, write_groups

TEXTS = [["a", "bcd"], ["", "ef"]]


def finished_groups() -> list[Group]:
    """g0 with responses `a` and `bcd`; g1, dropped; g2 with one without tokens and `ef`, cut at the limit."""

    def script(request):
        sample = attempt_of(request)[0]
        match request.request_id[:2]:
            case "g0":
                return Reply(TEXTS[0][sample])
            case "g1":
                return Reply(finish="error")
        return Reply(ids=()) if sample == 0 else Reply("ef", finish="length")

    manager, engine, _ = make_manager(script, lambda turn: EnvStep(len(turn.response_text) / 2))
    engine.load_weights([], 7)
    for index in range(3):
        manager.start(make_order(f"g{index}"), make_prompt(index, "q" * (index + 1)), SAMPLING)
    return sorted(drive(manager), key=lambda group: group.sequence)


def test_rows_to_the_token():
    client = CountingClient()
    groups = finished_groups()
    results = write_groups(client, PARTITION, groups)
    assert client.puts == 1
    assert [(result.group_id, result.status, result.reason, result.attempts) for result in results] == [
        ("g0", "ready", None, 1),
        ("g1", "dropped", "generation_error", 5),
        ("g2", "ready", None, 1),
    ]
    assert results[1].meta is None
    assert results[1].detail == "the engine gave up"
    assert (results[1].start_version, results[1].samples) == (-1, ())
    assert client.list_sample_ids(PARTITION) == ["g0_g0", "g0_g1", "g2_g0", "g2_g1"]
    for result, texts, prompt in (
        (results[0], TEXTS[0], make_prompt(0)),
        (results[2], TEXTS[1], make_prompt(2, "qqq")),
    ):
        assert result.meta is not None
        assert result.meta.sample_ids == [f"{result.group_id}_g0", f"{result.group_id}_g1"]
        assert (result.start_version, result.end_version, result.target_step) == (7, 7, 3)
        rows = read_columns(client, result.meta, select_fields=ROLLOUT_FIELDS)
        assert set(rows) == set(ROLLOUT_FIELDS)
        p = len(prompt.prompt_ids)
        for i, text in enumerate(texts):
            drawn = [*text.encode(), *([CLOSE] if text and text != "ef" else [])]
            length = p + len(drawn)
            assert rows["input_lengths"][i] == length == result.meta.sequence_lengths[i]
            assert rows["input_ids"][i, :length].tolist() == [*prompt.prompt_ids, *drawn]
            assert rows["token_mask"][i, :length].tolist() == [0.0] * p + [1.0] * len(drawn)
            assert not rows["token_mask"][i, length:].any()
            logprobs = [0.0] * p + [logprob_of(t, token) for t, token in enumerate(drawn)]
            torch.testing.assert_close(rows["generation_logprobs"][i, :length], torch.tensor(logprobs))
            assert rows["prompt_ids_for_adv"][i].tolist() == list(prompt.prompt_ids)
            assert rows["total_reward"][i] == len(text) / 2
            assert rows["truncated"][i] == (text == "ef")
            assert rows["mask_sample"][i] == (text == "")
            assert result.meta.tags[i] == {
                "weight_version": 7,
                "input_lengths": length,
                "source_id": prompt.source_id,
                "total_reward": len(text) / 2,
                "response_tokens": len(drawn),
                "turns": 1,
                "truncated": text == "ef",
            }
        assert rows["sample_mask"].tolist() == [1.0, 1.0]
    kinds = {name: rows[name].dtype for name in ROLLOUT_FIELDS}
    floats = {"token_mask", "sample_mask", "generation_logprobs", "total_reward"}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == floats
    assert {name for name, kind in kinds.items() if kind == torch.bool} == {"truncated", "mask_sample"}
    assert [sample.reward for sample in results[0].samples] == [0.5, 1.5]


def test_prompts_of_different_lengths_share_a_put():
    client = CountingClient()
    results = write_groups(client, PARTITION, finished_groups())
    joined = results[0].meta.concat(results[2].meta)
    prompts = client.get_samples(joined.sample_ids, PARTITION, ["prompt_ids_for_adv"])["prompt_ids_for_adv"]
    assert [len(row) for row in prompts.unbind()] == [len(make_prompt(0).prompt_ids)] * 2 + [
        len(make_prompt(2, "qqq").prompt_ids)
    ] * 2


def test_nothing_to_write_is_no_put():
    client = CountingClient()
    assert write_groups(client, PARTITION, []) == []
    assert [result.status for result in write_groups(client, PARTITION, [finished_groups()[1]])] == ["dropped"]
    assert client.puts == 0


def test_a_put_that_fails_leaves_no_row():
    client = CountingClient()
    client.fail_after_writing = True
    with pytest.raises(TimeoutError):
        write_groups(client, PARTITION, finished_groups())
    assert client.list_sample_ids(PARTITION) == []


def test_clearing_takes_all_rows_of_the_named_groups_only():
    client = CountingClient()
    write_groups(client, PARTITION, finished_groups())
    clear_groups(client, PARTITION, ["g0", "g", "unknown"])
    clear_groups(client, PARTITION, ["g0"])
    assert client.list_sample_ids(PARTITION) == ["g2_g0", "g2_g1"]
