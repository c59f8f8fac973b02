"""What passes between the parts of the data plane: its config, the metadata of a batch, and the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field

from nemo_rl.utils.config import ConfigModel

if TYPE_CHECKING:
    from tensordict import TensorDict


class ObservabilityConfig(ConfigModel):
    """What the data plane reports about itself."""

    enabled: bool = False
    """Time every call and log one line for it at debug level."""


class LocalDataPlaneConfig(ConfigModel):
    """A data plane inside each worker's process; rows never leave it."""

    enabled: Literal[True] = True
    """Workers always read their rows from the plane."""
    impl: Literal["local"] = "local"
    """Which data plane; `local` keeps rows in the worker that loaded them."""
    max_partitions: int = Field(default=2, ge=1)
    """Batches that a worker may hold at once: the one in training and those loaded ahead."""
    observability: ObservabilityConfig | None = None
    """What the data plane reports about itself; null reports nothing."""


class SimpleStorageConfig(ConfigModel):
    """Rows in the memory of storage actors."""

    num_storage_units: int | None = Field(default=None, ge=1)
    """Storage actors, dealt over the nodes; null starts one per node."""
    storage_capacity: int | None = Field(default=1_000_000, ge=1)
    """Rows that all storage actors hold together, over all partitions; a write beyond it fails. Null sets no limit."""


class MooncakeCpuConfig(ConfigModel):
    """Rows in a Mooncake store; needs the package `mooncake-transfer-engine`."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """How rows travel between processes."""
    device_name: str = ""
    """Network device for `rdma`; empty lets Mooncake choose."""
    global_segment_size: int = Field(default=4 * 2**30, ge=2**20)
    """Bytes of memory that each client process lends to the store."""
    local_buffer_size: int = Field(default=2**30, ge=2**20)
    """Bytes of transfer buffer in each client process."""
    use_gdr: bool = False
    """Move rows straight to and from GPU memory; needs `protocol: rdma`."""
    gdr_staging_buffer_mb: int = Field(default=1024, ge=1)
    """Mebibytes of GPU memory for those transfers, per process."""


class DataPlaneConfig(ConfigModel):
    """A data plane that all processes of a run share, made of TransferQueue's actors in the run's Ray cluster."""

    enabled: bool = True
    """Whether rows go through the plane."""
    impl: Literal["transfer_queue"] = "transfer_queue"
    """Which data plane."""
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    """Where the rows are kept; only the section of that name is read."""
    claim_meta_poll_interval_s: float = Field(default=0.05, gt=0)
    """Seconds between two looks of a consumer that waits for rows."""
    ack_timeout_ms: int = Field(default=60_000, ge=100)
    """Milliseconds that one call may wait for the answer of the plane's actors."""
    attach_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that the driver waits for the actors to start, and other processes for the driver to start them."""
    loopback_only: bool | None = None
    """Listen where only this machine can connect; null does so as long as the cluster has one node.

    What listens is not protected by a password: on several nodes, keep the network between them private.
    """
    simple: SimpleStorageConfig | None = None
    """The backend `simple`; null takes its defaults."""
    mooncake_cpu: MooncakeCpuConfig | None = None
    """The backend `mooncake_cpu`; null takes its defaults."""
    observability: ObservabilityConfig | None = None
    """What the data plane reports about itself; null reports nothing."""


DataPlaneRuntimeConfig: TypeAlias = DataPlaneConfig | LocalDataPlaneConfig
"""Every config that `build_data_plane_client` knows."""


def backend_config(cfg: DataPlaneConfig) -> SimpleStorageConfig | MooncakeCpuConfig:
    """The section of the backend that `cfg` chooses, or its defaults."""
    if cfg.backend == "simple":
        return cfg.simple or SimpleStorageConfig()
    return cfg.mooncake_cpu or MooncakeCpuConfig()


@dataclass(frozen=True)
class KVBatchMeta:
    """Which rows, never their tensors: all that the controller sees of a batch.

    Every method returns a new meta whose lists are its own; `extra_info` is copied one level deep.

    Example: `KVBatchMeta("train", "prev_lp", ["a", "b"], fields=["input_ids"], sequence_lengths=[7, 5])`.

    Attributes:
        partition_id: the partition that holds the rows.
        task_name: the consumer the rows are for.
        sample_ids: ids of the rows, in batch order.
        fields: columns to read; None leaves the choice to the reader.
        sequence_lengths: tokens of each row.
        extra_info: facts about the whole batch; the keys are listed in `schema`.
        tags: small facts about each row, such as `source_id` or `weight_version`.

    Raises:
        ValueError: `tags` and `sample_ids` differ in length.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise ValueError(
                f"partition {self.partition_id!r}: {len(self.tags)} tags for {len(self.sample_ids)} sample ids"
            )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def stamp_tags(self, scalars: Mapping[str, Sequence[Any]]) -> KVBatchMeta:
        """The same rows with one more tag per entry of `scalars`; each value is a column of `size` scalars.

        Raises:
            ValueError: a column has another length.
        """
        tags = [dict(tag) for tag in self.tags] if self.tags is not None else [{} for _ in self.sample_ids]
        for name, column in scalars.items():
            if len(column) != self.size:
                raise ValueError(f"tag {name!r} has {len(column)} values for {self.size} rows")
            for tag, value in zip(tags, column, strict=True):
                tag[name] = value
        return replace(self._copy(), tags=tags)

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """The rows at `indices`, in that order."""
        lengths, tags = self.sequence_lengths, self.tags
        return replace(
            self._copy(),
            sample_ids=[self.sample_ids[i] for i in indices],
            sequence_lengths=None if lengths is None else [lengths[i] for i in indices],
            tags=None if tags is None else [dict(tags[i]) for i in indices],
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Rows `start` to `stop - 1`."""
        return self.subset(range(self.size)[start:stop])

    def drop(self, indices: Sequence[int]) -> KVBatchMeta | None:
        """All rows but those at `indices`; None when nothing is left."""
        gone = {range(self.size)[i] for i in indices}
        kept = [i for i in range(self.size) if i not in gone]
        return self.subset(kept) if kept else None

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """The rows of this meta, then those of `others`.

        `fields` is the union in first-seen order; `sequence_lengths` and `tags` survive only where every operand has
        them; `task_name` and `extra_info` are those of this meta.

        Raises:
            ValueError: an operand belongs to another partition.
        """
        metas = (self, *others)
        for other in others:
            if other.partition_id != self.partition_id:
                raise ValueError(f"cannot join rows of {self.partition_id!r} and {other.partition_id!r}")
        fields = [meta.fields for meta in metas if meta.fields is not None]
        lengths = [meta.sequence_lengths for meta in metas if meta.sequence_lengths is not None]
        tags = [meta.tags for meta in metas if meta.tags is not None]
        return replace(
            self._copy(),
            sample_ids=[sample_id for meta in metas for sample_id in meta.sample_ids],
            fields=list(dict.fromkeys(name for names in fields for name in names)) if fields else None,
            sequence_lengths=[n for part in lengths for n in part] if len(lengths) == len(metas) else None,
            tags=[dict(tag) for part in tags for tag in part] if len(tags) == len(metas) else None,
        )

    def with_fields(self, names: Sequence[str]) -> KVBatchMeta:
        """The same rows with `names` appended to `fields`, without duplicates."""
        return replace(self._copy(), fields=list(dict.fromkeys([*(self.fields or ()), *names])))

    def _copy(self) -> KVBatchMeta:
        return replace(
            self,
            sample_ids=list(self.sample_ids),
            fields=None if self.fields is None else list(self.fields),
            sequence_lengths=None if self.sequence_lengths is None else list(self.sequence_lengths),
            extra_info=dict(self.extra_info),
            tags=None if self.tags is None else [dict(tag) for tag in self.tags],
        )


class DataPlaneClient(ABC):
    """A store of partitions: rows by id, columns by name, and per task a cursor over the rows it has not seen.

    A stage is finished when its output column exists, so there is no call that marks rows as consumed.
    """

    process_local: bool = False
    """Rows never leave this process, so they are stored as they are: padded, by reference."""

    @abstractmethod
    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, consumer_tasks: Sequence[str]
    ) -> None:
        """Declares a partition of `num_samples` rows, the columns they may have and the tasks that read them."""

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Hands out rows that `task_name` has not been given yet and that have all of `required_fields`.

        Once `finish_partition` was called it may be fewer rows than `batch_size`, and none when the task has had all.

        Args:
            batch_size: rows wanted.
            blocking: wait for them; else an empty meta says that they are not there yet.
            timeout_s: limit of the wait in seconds.

        Raises:
            KeyError: unknown partition or task.
            TimeoutError: the rows did not come; names wanted and ready counts and the missing columns.
        """

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """The rows of `meta`: columns `select_fields`, else `meta.fields`.

        Raises:
            ValueError: neither names a column; "all columns" is never meant.
            KeyError: a row or column is not there; never fewer rows than asked for.
        """
        names = meta.fields if select_fields is None else select_fields
        if not names:
            raise ValueError(f"partition {meta.partition_id!r}: name the columns to read")
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether every listed task has been given all rows of the partition."""

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Writes columns, tags or both for the given rows and returns their meta.

        Raises:
            ValueError: nothing to write, or a count that differs from the number of ids.
        """

    @abstractmethod
    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """The named columns of the given rows, in the order of `sample_ids`; moves no cursor.

        Raises:
            KeyError: a row or column is not there; names them and the partition.
        """

    def get_meta(self, sample_ids: Sequence[str], partition_id: str) -> KVBatchMeta:
        """What the plane knows of rows: their tags, their lengths where tagged, and the columns that all of them have.

        Raises:
            KeyError: a row is not there; names it and the partition.
            NotImplementedError: a plane that keeps no such record.
        """
        raise NotImplementedError(f"{type(self).__name__} does not describe rows")

    def finish_partition(self, partition_id: str) -> None:  # noqa: B027  nothing to do where batches are written whole
        """Says that no more rows will come.

        From then on a claim that wants more rows than its task has left gets those, and an empty meta when there are
        none; it still waits for columns of rows that are there. By default nothing is done: batches are written whole.

        Raises:
            KeyError: unknown partition.
        """

    @abstractmethod
    def list_sample_ids(self, partition_id: str) -> list[str]:
        """Ids of the rows of the partition, sorted; empty for an unknown one."""

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Removes rows, or with None the whole partition. What is not there is no error: clearing twice is safe."""

    def supports_checkpointing(self) -> bool:
        """Whether the content can be saved and restored; a plane inside one process cannot, its rows are read again."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Frees everything; may be called more than once."""
