"""Who loads what. Not covered: layouts whose data axis is not the first one beyond the one case below."""

import pytest

from nemo_rl.data.energon.topology import LoaderCopy, resolve_topology_mapper
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.utils.errors import UserError

DP2_TP2 = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
TP2_DP2 = NamedSharding([[0, 1], [2, 3]], ["tensor_parallel", "data_parallel"])
DP1 = NamedSharding([0], ["data_parallel"])
DP2 = NamedSharding([0, 1], ["data_parallel"])
DP4 = NamedSharding([0, 1, 2, 3], ["data_parallel"])


def test_default_places_one_loader_per_replica():
    plan = resolve_topology_mapper("default").map(DP2_TP2)
    assert plan.copies == (LoaderCopy(0, 2, 0, (0, 1)), LoaderCopy(1, 2, 2, (2, 3)))
    assert resolve_topology_mapper("default").map(TP2_DP2).copies == (
        LoaderCopy(0, 2, 0, (0, 2)),
        LoaderCopy(1, 2, 1, (1, 3)),
    )
    assert (plan.logical_world_size, plan.num_logical_shards) == (2, 2)
    assert [plan.shards_of(rank) for rank in range(2)] == [(0,), (1,)]
    assert plan.copy_for_logical_rank(1) is plan.copies[1]
    with pytest.raises(ValueError, match="logical rank 2"):
        plan.copy_for_logical_rank(2)
    with pytest.raises(ValueError, match="logical rank -1"):
        plan.shards_of(-1)


def test_default_hash_changes_with_any_part_of_the_layout():
    hashes = {resolve_topology_mapper("default").map(layout).placement_hash for layout in (DP2_TP2, TP2_DP2, DP1, DP2)}
    assert len(hashes) == 4
    assert all(len(value) == 64 for value in hashes)
    assert resolve_topology_mapper("default").map(DP2).placement_hash in hashes


def test_elastic_deals_the_same_shards_to_any_number_of_replicas():
    plans = [resolve_topology_mapper("elastic", 4).map(layout) for layout in (DP1, DP2, DP4, DP2_TP2)]
    assert len({plan.placement_hash for plan in plans}) == 1
    for plan in plans:
        dealt = [shard for rank in range(plan.logical_world_size) for shard in plan.shards_of(rank)]
        assert dealt == [0, 1, 2, 3]
        assert len({len(plan.shards_of(rank)) for rank in range(plan.logical_world_size)}) == 1
    assert resolve_topology_mapper("elastic", 8).map(DP2).placement_hash != plans[0].placement_hash


def test_refusals_name_the_key():
    with pytest.raises(UserError, match="logical_shards: 3 can't be dealt to 2"):
        resolve_topology_mapper("elastic", 3).map(DP2)
    with pytest.raises(UserError, match=r"needs data\.energon\.logical_shards"):
        resolve_topology_mapper("elastic")
    with pytest.raises(UserError, match="'elastik' is neither"):
        resolve_topology_mapper("elastik")
    with pytest.raises(ValueError, match="no axis 'data_parallel'"):
        resolve_topology_mapper("default").map(NamedSharding([0, 1], ["tensor_parallel"]))
