"""The buffer of finished groups: what it refuses, what it clears, and its way through JSON.

Not covered: the rows themselves, which it never touches.
"""

import asyncio
import json

import pytest

from nemo_rl.algorithms.async_utils.replay_buffer import BufferedGroup, TQReplayBuffer
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.utils.errors import UserError


def group(name: str, *, size: int = 2, target: int | None = None, partition: str = "rollouts") -> BufferedGroup:
    meta = KVBatchMeta(
        partition,
        "train",
        [f"{name}_g{i}" for i in range(size)],
        fields=["input_ids"],
        sequence_lengths=[3 + i for i in range(size)],
        extra_info={"pad_to_multiple": 8},
        tags=[{"weight_version": 1, "total_reward": 0.1 * i, "truncated": False} for i in range(size)],
    )
    return BufferedGroup(name, meta, 1, 2, target)


def buffer(*groups: BufferedGroup, capacity: int = 3, cleared: list[str] | None = None) -> TQReplayBuffer:
    async def drop_rows(sample_ids: list[str]) -> None:
        if cleared is not None:
            cleared.extend(sample_ids)

    made = TQReplayBuffer("rollouts", drop_rows, capacity)
    for one in groups:
        made.add(one)
    return made


def names(held: TQReplayBuffer) -> list[str]:
    return [one.group_id for one in held.groups]


def test_groups_stay_in_order_of_arrival() -> None:
    held = buffer(group("b", target=4), group("a", target=5), group("c", target=4))
    assert names(held) == ["b", "a", "c"]
    assert (held.size(), held.count_for_target_step(4), held.count_for_target_step(6)) == (3, 2, 0)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (group("a"), "a is in the buffer already"),
        (group("z", partition="other"), "of partition 'other'"),
        (group("z"), "holds 3 groups .*max_buffered_rollouts"),
    ],
)
def test_what_does_not_belong_is_refused_and_changes_nothing(one: BufferedGroup, why: str) -> None:
    held = buffer(group("a"), group("b"), group("c"))
    with pytest.raises(ValueError, match=why):
        held.add(one)
    assert names(held) == ["a", "b", "c"]


def test_released_groups_keep_their_rows_and_discarded_ones_lose_them_in_one_call() -> None:
    cleared: list[str] = []
    held = buffer(group("a"), group("b"), group("c"), cleared=cleared)
    held.release([held.groups[1]])
    assert (names(held), cleared) == (["a", "c"], [])
    asyncio.run(held.discard(held.groups))
    assert (names(held), cleared) == ([], ["a_g0", "a_g1", "c_g0", "c_g1"])


def test_a_group_that_is_gone_cannot_be_handed_over_twice() -> None:
    held = buffer(group("a"))
    [one] = held.groups
    held.release([one])
    with pytest.raises(KeyError):
        held.release([one])


def test_the_state_goes_through_json_unchanged() -> None:
    held = buffer(group("b", target=4), group("a"), group("c", target=0))
    state = json.loads(json.dumps(held.state_dict()))
    again = buffer()
    again.load_state_dict(state, expected_group_size=2)
    assert again.groups == held.groups
    assert again.state_dict() == held.state_dict()
    assert again.groups[0].meta.tags == held.groups[0].meta.tags
    # Lists of its own: the trainer may not change what the other holds.
    assert again.groups[0].meta.sample_ids is not held.groups[0].meta.sample_ids


@pytest.mark.parametrize(
    ("saved", "capacity", "size", "why"),
    [
        ("other", 3, 2, "partition 'other', not 'rollouts'"),
        ("rollouts", 3, 4, r"\[2\] samples per prompt, num_generations_per_prompt is 4"),
        ("rollouts", 1, 2, "2 groups of rollouts were saved, async_rl.max_buffered_rollouts is 1"),
    ],
)
def test_a_state_of_another_run_is_refused_whole(saved: str, capacity: int, size: int, why: str) -> None:
    state = {**buffer(group("a"), group("b")).state_dict(), "partition_id": saved}
    again = buffer(capacity=capacity)
    with pytest.raises(UserError, match=why):
        again.load_state_dict(state, expected_group_size=size)
    assert again.size() == 0


def test_one_group_of_another_size_is_enough_to_refuse() -> None:
    state = buffer(group("a"), group("b", size=3)).state_dict()
    again = buffer()
    with pytest.raises(UserError, match=r"\[3\] samples"):
        again.load_state_dict(state, expected_group_size=2)
    assert again.size() == 0
