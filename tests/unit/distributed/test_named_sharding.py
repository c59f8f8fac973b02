"""NamedSharding against coordinates computed by hand."""

import numpy as np
import pytest

from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


def test_coordinates_of_a_pp2_dp2_cp1_tp2_layout() -> None:
    sharding = NamedSharding(np.arange(8).reshape(2, 2, 1, 2), AXES)
    # rank = 4 * pp + 2 * dp + tp
    for rank in range(8):
        coords = sharding.get_worker_coords(rank)
        assert list(coords) == AXES
        assert coords == dict(zip(AXES, (rank // 4, rank // 2 % 2, 0, rank % 2), strict=True))
        assert sharding.get_ranks(**coords) == rank
    assert sharding.shape == dict(zip(AXES, (2, 2, 1, 2), strict=True))
    assert (sharding.ndim, sharding.size, sharding.names) == (4, 8, AXES)
    assert sharding.get_axis_size("data_parallel") == 2 and sharding.get_axis_index("tensor_parallel") == 3


def test_leaders_are_the_ranks_at_zero_on_the_replicated_axes() -> None:
    sharding = NamedSharding(np.arange(8).reshape(2, 2, 1, 2), AXES)
    leaders = [r for r in range(8) if NamedSharding.is_axis_zero(sharding.get_worker_coords(r), REPLICATED_AXES)]
    assert leaders == [0, 2]
    assert NamedSharding.is_axis_zero({"data_parallel": 3}, REPLICATED_AXES), "a missing axis counts as 0"


def test_ranks_by_coordinate() -> None:
    sharding = NamedSharding([[3, 1], [0, 2]], ["a", "b"])
    assert sharding.get_ranks_by_coord(a=0) == [1, 3]
    assert sharding.get_ranks_by_coord(b=1) == [1, 2]
    assert sharding.get_ranks_by_coord() == [0, 1, 2, 3]
    assert sharding.get_ranks_by_coord(a=2) == [] and sharding.get_ranks_by_coord(a=-1) == []
    assert sharding.get_ranks(a=1) == NamedSharding([0, 2], ["b"])


def test_copies_do_not_reach_the_layout() -> None:
    sharding = NamedSharding([[0, 1]], ["a", "b"])
    sharding.layout[0, 0] = 9
    sharding.names.append("c")
    assert sharding == NamedSharding([[0, 1]], ["a", "b"])
    assert sharding != NamedSharding([[0, 1]], ["b", "a"]) and sharding != NamedSharding([[1, 0]], ["a", "b"])
    assert hash(sharding) == hash(NamedSharding([[0, 1]], ["a", "b"]))


@pytest.mark.parametrize(
    ("layout", "names", "says"),
    [
        ([[0.0, 1.0]], ["a", "b"], "integer"),
        ([[0, 1], [2]], ["a", "b"], "ragged|integer"),
        ([[0, 1]], ["a"], "2 dimensions"),
        ([[0, 1]], ["a", "a"], "repeat"),
        ([[0, 0]], ["a", "b"], "twice"),
    ],
)
def test_refused_layouts(layout: list, names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NamedSharding(layout, names)


def test_refused_questions() -> None:
    sharding = NamedSharding([[0, 1]], ["a", "b"])
    with pytest.raises(ValueError, match="rank 5"):
        sharding.get_worker_coords(5)
    with pytest.raises(ValueError, match="unknown axis 'c'"):
        sharding.get_ranks_by_coord(c=0)
    with pytest.raises(ValueError, match="unknown axis 'c'"):
        sharding.get_axis_index("c")
    with pytest.raises(KeyError):
        sharding.get_axis_size("c")
    with pytest.raises(IndexError, match="b=2"):
        sharding.get_ranks(b=2)
