"""The policy's weights on their way to the samplers: from the workers into the object store, in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.models.engine.checkpoint import module_weights
from nemo_rl.models.weight_bucket import WeightBucket, WeightEntry

if TYPE_CHECKING:
    from nemo_rl.models.engine.engine import Engine

BUCKET_BYTES = 64 * 2**20

# Bytes can be seen as elements of any type from a multiple of this on.
_ALIGNMENT = 16


class WeightSourceMixin:
    """For a worker that has an `engine`."""

    _exported: list[Any]  # who put an object into the store keeps it alive, and this worker is asked for it later

    @property
    def engine(self) -> Engine:
        """The engine whose weights these are; the host's."""
        raise NotImplementedError(f"{type(self).__name__} must say which engine holds its weights")

    def export_weights(self, dtype: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> list[WeightBucket]:
        """Puts the whole weights into the object store; the buckets on rank 0, `[]` elsewhere.

        A collective over the ranks where the weights are sharded. Names are those of the model's parameters and
        persistent buffers, which for most models are those of its checkpoint; tied weights come once. The buckets live
        until the next export, or until this worker ends.

        Args:
            dtype: torch's name of a floating type to convert to, such as `bfloat16`; None leaves float32.
            bucket_bytes: a bucket is closed when it has reached this size.

        Raises:
            ValueError: the worker holds a critic, which nobody samples from, or `dtype` is no floating type.
        """
        if self.engine.config.head != "lm":
            raise ValueError(f"a model with a {self.engine.config.head} head has no weights for a sampler")
        wanted = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            raise ValueError(f"dtype {dtype!r} is no floating type of torch")
        # The last ones go first: the store never holds the weights twice.
        self._exported = []
        buckets: list[WeightBucket] = []
        entries: list[WeightEntry] = []
        parts: list[np.ndarray] = []
        is_source = dist.get_rank() == 0

        def close() -> None:
            if entries:
                buckets.append(WeightBucket(ray.put(np.concatenate(parts)), tuple(entries)))
                entries.clear()
                parts.clear()

        end = 0
        for name, tensor in self._whole_weights():
            if not is_source:
                continue
            if not entries:
                end = 0
            converted = tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
            raw = converted.cpu().contiguous().flatten().view(torch.uint8).numpy()
            dtype_name = str(converted.dtype).removeprefix("torch.")
            entries.append(WeightEntry(name, dtype_name, tuple(converted.shape), end, end + raw.size))
            parts += [raw, np.zeros(-raw.size % _ALIGNMENT, np.uint8)]
            end += raw.size + parts[-1].size
            if end >= bucket_bytes:
                close()
        close()
        self._exported = buckets
        return buckets

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, one at a time, so that no more than one is gathered at once."""
        for name, tensor in module_weights(self.engine).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bucket_tensors(bucket: WeightBucket, data: np.ndarray) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a bucket whose array was fetched. They share its memory, which must not be written to."""
    for entry in bucket.entries:
        raw = torch.frombuffer(data, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start)
        yield entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)
