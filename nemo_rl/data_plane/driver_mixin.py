"""The controller's side of the data plane: metas are prepared for one stage, then cut and sent to the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.preshard import stamp_common_width
from nemo_rl.data_plane.schema import GLOBAL_FORWARD_PAD_SEQLEN

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class TQDriverMixin:
    """For a driver that holds a config `cfg` and a client `dp_client`.

    A driver that packs on its side also sets `use_dynamic_batches` with `dynamic_batching_args`, or
    `use_sequence_packing` with `sequence_packing_args`.

    No method changes the meta that it is given: two models may share one.
    """

    cfg: Any
    dp_client: DataPlaneClient
    use_dynamic_batches: bool = False
    use_sequence_packing: bool = False
    dynamic_batching_args: dict[str, Any]
    sequence_packing_args: dict[str, Any]

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """The named columns of the rows of `meta`, padded `[N, S]` to the width that the workers use."""
        # Tensors are read on this side by a few stages only; a driver that never does loads no tensor library.
        from nemo_rl.data_plane.column_io import read_columns

        stamped = self._stamp_pad_seqlen(meta)
        return read_columns(self.dp_client, stamped, select_fields=select_fields, pad_value_dict=pad_value_dict)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Adds columns `[N, ...]` to the rows of `meta`."""
        from nemo_rl.data_plane.column_io import write_columns

        write_columns(self.dp_client, meta, fields=fields)

    def _packing_args(
        self, mb_tokens_key: Literal["train_mb_tokens", "logprob_mb_tokens"]
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """`(sequence_packing_args, dynamic_batching_args)` with the token budget of the stage; at most one is not None.

        Dynamic batching wins where both are on.
        """
        if self.use_dynamic_batches:
            budget = self.cfg["dynamic_batching"][mb_tokens_key]
            return None, {**self.dynamic_batching_args, "max_tokens_per_microbatch": budget}
        if self.use_sequence_packing:
            budget = self.cfg["sequence_packing"][mb_tokens_key]
            return {**self.sequence_packing_args, "max_tokens_per_microbatch": budget}, None
        return None, None

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> KVBatchMeta:
        """The meta with the width that all its readers pad to; unchanged when it has one or has no lengths."""
        if not meta.sequence_lengths or GLOBAL_FORWARD_PAD_SEQLEN in meta.extra_info:
            return meta
        multiple = self.dynamic_batching_args.get("sequence_length_round") if self.use_dynamic_batches else None
        return stamp_common_width([meta], multiple=multiple or 1)[0]

    def _isolated_meta(self, meta: KVBatchMeta, *, fields: Sequence[str], task_name: str) -> KVBatchMeta:
        """A copy for one stage: its columns, its task, and a width computed afresh.

        A width that another model stamped would otherwise decide how this one pads.
        """
        copy = meta.subset(range(meta.size))
        copy.extra_info.pop(GLOBAL_FORWARD_PAD_SEQLEN, None)
        return self._stamp_pad_seqlen(replace(copy, fields=list(fields), task_name=task_name))
