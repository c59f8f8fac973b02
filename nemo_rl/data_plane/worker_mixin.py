"""The worker's side of the data plane: the leader of a replica reads and writes, its siblings get the broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.data_plane.column_io import read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneRuntimeConfig, KVBatchMeta
from nemo_rl.data_plane.schema import (
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS,
    INPUT_LENGTHS,
    PACKING_KEYS,
    PREV_LOGPROBS,
    PROMPT_IDS_FOR_ADV,
    REFERENCE_POLICY_LOGPROBS,
    ROW_MOVES,
    TOKEN_ALIGNED_FIELDS,
    VALUES,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import broadcast_batch
from nemo_rl.distributed.named_sharding import REPLICATED_AXES, NamedSharding
from nemo_rl.distributed.row_exchange import Move, exchange_rows
from nemo_rl.utils.errors import PeerError
from nemo_rl.utils.phases import phase

FetchPolicy = Literal["auto", "independent", "leader_broadcast"]

# The one column of the batch that a leader broadcasts instead of rows it could not read.
_FETCH_ERROR = "fetch_error"


class DataPlaneHost(Protocol):
    """What the class that mixes in `TQWorkerMixin` computes; batches are padded `[B, S]` and must not be written to.

    `get_logprobs`, `get_reference_policy_logprobs` and `get_values` return a mapping with the float column `[B, S']`
    `logprobs`, `reference_logprobs` or `values`, `S'` being at least the longest row.
    """

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]: ...

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> Mapping[str, Any]: ...

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> Mapping[str, Any]: ...

    def get_values(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> Mapping[str, Any]: ...

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None: ...

    def train_microbatch(self, data: BatchedDataDict) -> None: ...

    def finish_train_step(self) -> dict[str, Any]: ...

    def abort_train_step(self) -> None: ...

    def fail_train_step(self) -> None: ...

    def withdraw_from_train_step(self) -> None: ...

    def eval_microbatch(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, Any]: ...


class TQWorkerMixin:
    """Entry points that take a meta, fetch its rows, and call the method of the same name without `_presharded`.

    The rows of a meta are those of one replica. Its leader, the rank with coordinate 0 on every axis of
    `REPLICATED_AXES`, is the only one that touches the data plane; the siblings get the batch by broadcast. The host
    provides the methods of `DataPlaneHost` and overrides `_local_coords`, `_get_replica_group` where a replica has more
    than one rank, and `_get_data_group` where rows change places between replicas.
    """

    tokenizer: Any = None
    _dp_client: DataPlaneClient | None = None

    def setup_data_plane(self, cfg: DataPlaneRuntimeConfig) -> None:
        """Attaches this process to the data plane; further calls change nothing."""
        if self._dp_client is None:
            self._dp_client = build_data_plane_client(cfg, bootstrap=False)

    def train_presharded(
        self, meta: KVBatchMeta, loss_fn: Any, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None
    ) -> dict[str, Any]:
        """Whole optimizer steps over the rows of `meta`; returns the train result of this rank."""
        try:
            return self._host.train(self._fetch(meta), loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)
        except PeerError:
            raise
        except Exception:  # whatever went wrong, the other replicas wait
            self._host.withdraw_from_train_step()
            raise

    def get_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Writes the column `prev_logprobs`, float `[T]` per row."""
        result = self._host.get_logprobs(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write_back_result_field(meta, result, result_key="logprobs", tq_field=PREV_LOGPROBS)

    def get_reference_policy_logprobs_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Writes the column `reference_policy_logprobs`, float `[T]` per row."""
        result = self._host.get_reference_policy_logprobs(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write_back_result_field(meta, result, result_key="reference_logprobs", tq_field=REFERENCE_POLICY_LOGPROBS)

    def get_values_presharded(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Writes the column `values`, float `[T]` per row."""
        result = self._host.get_values(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write_back_result_field(meta, result, result_key="values", tq_field=VALUES)

    def begin_train_step_presharded(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens an optimizer step; one that is open already can't be finished then."""
        with self._failing_the_step():
            self._host.begin_train_step(loss_fn, gbs=gbs, mbs=mbs)

    def train_microbatch_presharded(self, meta: KVBatchMeta) -> None:
        """Adds the gradients of the rows of `meta` to the open step; where it fails, the step can't be finished."""
        with self._failing_the_step():
            self._host.train_microbatch(self._fetch(meta))

    def finish_train_step_presharded(self) -> dict[str, Any]:
        """Closes the step with one update; returns the train result of this rank and `is_replica_leader`.

        The siblings of a replica count the same tokens, so only the leaders' results may be summed.
        """
        return {**self._host.finish_train_step(), "is_replica_leader": self._is_replica_leader()}

    def abort_train_step_presharded(self) -> None:
        """Discards the open step, if there is one."""
        self._host.abort_train_step()

    def eval_microbatch_presharded(self, meta: KVBatchMeta, loss_fn: Any) -> dict[str, Any]:
        """The loss and its metrics over the rows of `meta`, without gradients."""
        return self._host.eval_microbatch(self._fetch(meta), loss_fn)

    @contextmanager
    def _failing_the_step(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever went wrong, this rank's part is missing
            self._host.fail_train_step()
            raise

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica, leader first; None for a replica of one rank."""
        return None

    def _get_data_group(self) -> dist.ProcessGroup:
        """The ranks at this place of all replicas, in their order."""
        raise NotImplementedError(f"{type(self).__name__} must say who its counterparts in other replicas are")

    def _local_coords(self) -> dict[str, int]:
        """Coordinates of this rank by axis name."""
        raise NotImplementedError(f"{type(self).__name__} must say where its rank is on the axes")

    def _is_replica_leader(self) -> bool:
        return NamedSharding.is_axis_zero(self._local_coords(), REPLICATED_AXES)

    def _require_dp_client(self) -> DataPlaneClient:
        if self._dp_client is None:
            raise RuntimeError("no data plane yet; call setup_data_plane first")
        return self._dp_client

    def _pad_value_dict(self) -> dict[str, float]:
        pad_id = getattr(self.tokenizer, "pad_token_id", None)
        return {} if pad_id is None else dict.fromkeys((INPUT_IDS, PROMPT_IDS_FOR_ADV), pad_id)

    def _fetch(self, meta: KVBatchMeta, *, fetch_policy: FetchPolicy = "auto") -> BatchedDataDict:
        """The columns `meta.fields` of the rows of `meta`, padded `[B, S]` to the width stamped on it.

        A packing plan on the meta becomes that of the batch. A meta without rows gives a batch without rows: the rank
        has no share of the step, but its collectives have to run. With moves on the meta, rows change places with other
        replicas: then it is a collective over them.

        Args:
            fetch_policy: "independent" reads on this rank; "leader_broadcast" is a collective over the replica;
                "auto" takes the second where the replica has a group.

        Raises:
            ValueError: an unknown policy.
            RuntimeError: a broadcast without a group, or before `setup_data_plane`.
            PeerError: on the siblings, when the leader could not read, and with moves on the counterparts in other
                replicas; who could not read raises the cause itself.
        """
        if fetch_policy not in get_args(FetchPolicy):
            raise ValueError(f"fetch_policy is {fetch_policy!r}, it must be one of {get_args(FetchPolicy)}")
        group = self._get_replica_group()
        if fetch_policy == "leader_broadcast" and group is None:
            raise RuntimeError("fetch_policy 'leader_broadcast' needs a replica group")

        def read() -> BatchedDataDict:
            if group is None or fetch_policy == "independent" or dist.get_world_size(group) == 1:
                return self._read(meta)
            return self._read_and_broadcast(meta, group)

        with phase("fetch"):
            moves = meta.extra_info.get(ROW_MOVES)
            data = self._read_and_exchange(read, moves) if moves else read()
        for key in PACKING_KEYS:
            if key in meta.extra_info:
                setattr(data, key, meta.extra_info[key])
        return data

    def _read(self, meta: KVBatchMeta) -> BatchedDataDict:
        if not meta.sample_ids:
            return _no_rows(meta)
        return read_columns(self._require_dp_client(), meta, pad_value_dict=self._pad_value_dict())

    def _read_and_broadcast(self, meta: KVBatchMeta, group: dist.ProcessGroup) -> BatchedDataDict:
        source = dist.get_global_rank(group, 0)
        if self._is_replica_leader() != (dist.get_rank() == source):
            raise RuntimeError(f"rank {source} leads the replica group, {self._local_coords()} says otherwise")
        if self._is_replica_leader():
            try:
                data = self._read(meta)
            except Exception as error:
                # Whatever went wrong, the siblings wait in the broadcast: without this they would wait to its timeout.
                broadcast_batch(BatchedDataDict({_FETCH_ERROR: [f"{type(error).__name__}: {error}"]}), group, source)
                raise
            return broadcast_batch(data, group, source)
        data = broadcast_batch(None, group, source)
        if _FETCH_ERROR in data:
            raise PeerError(f"rank {source} could not read partition {meta.partition_id!r}: {data[_FETCH_ERROR][0]}")
        return data

    def _read_and_exchange(self, read: Callable[[], BatchedDataDict], moves: Sequence[Move]) -> BatchedDataDict:
        group = self._get_data_group()
        # Before any row is sent all ranks hear whose rows are missing: a message that never comes has no other end
        # than the group's time limit.
        missing = torch.zeros(dist.get_world_size(group))
        try:
            data = read()
        except Exception:  # whatever went wrong, the counterparts wait
            missing[dist.get_rank(group)] = 1.0
            dist.all_reduce(missing, group=group)
            raise
        dist.all_reduce(missing, group=group)
        if missing.any():
            ranks = ", ".join(str(dist.get_global_rank(group, i)) for i in missing.nonzero().flatten().tolist())
            raise PeerError(f"rank {ranks} could not read the rows that it has to hand on")
        return exchange_rows(data, moves, group)

    def _write_back(self, meta: KVBatchMeta, fields: Mapping[str, Tensor]) -> None:
        """Adds columns `[B, S]` to the rows of `meta`; the leader writes, its siblings return at once."""
        if self._is_replica_leader():
            with phase("write back"):
                on_cpu = {name: value.detach().cpu() for name, value in fields.items()}
                write_columns(self._require_dp_client(), meta, fields=on_cpu)

    def _write_back_result_field(self, meta: KVBatchMeta, result: Any, *, result_key: str, tq_field: str) -> None:
        """Writes `result[result_key]` as the column `tq_field`; checked on every rank, so that all fail together.

        Raises:
            RuntimeError: `result` is no mapping or has no such key.
            TypeError: the value is no tensor.
            ValueError: it has another number of rows than `meta`.
        """
        if not isinstance(result, Mapping) or result_key not in result:
            raise RuntimeError(f"the result for column {tq_field!r} has no {result_key!r}")
        value = result[result_key]
        if not isinstance(value, Tensor):
            raise TypeError(f"{result_key!r} is a {type(value).__name__}, column {tq_field!r} needs a tensor")
        if value.dim() == 0 or value.shape[0] != meta.size:
            raise ValueError(f"{result_key!r} has shape {tuple(value.shape)} for {meta.size} rows")
        self._write_back(meta, {tq_field: value})

    @property
    def _host(self) -> DataPlaneHost:
        return cast(DataPlaneHost, self)


def _no_rows(meta: KVBatchMeta) -> BatchedDataDict:
    """The columns of a meta that holds no row."""
    width = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 1))
    return BatchedDataDict(
        {
            name: torch.zeros(
                (0, width) if name in TOKEN_ALIGNED_FIELDS else (0,),
                dtype=torch.int64 if name in (INPUT_IDS, INPUT_LENGTHS) else torch.float32,
            )
            for name in meta.fields or ()
        }
    )
