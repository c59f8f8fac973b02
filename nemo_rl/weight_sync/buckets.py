"""The samplers' end of the hand-over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import ray
from torch import Tensor

from nemo_rl.models.weight_bucket import WeightBucket
from nemo_rl.models.weight_source import bucket_tensors

_FETCH_S = 600.0


def read_buckets(buckets: Sequence[WeightBucket]) -> Iterator[tuple[str, Tensor]]:
    """Names and weights, bucket by bucket; on the machine of the trainer without a copy.

    Raises:
        ray.exceptions.GetTimeoutError: a bucket did not come within ten minutes.
    """
    for bucket in buckets:
        data = ray.get(bucket.data, timeout=_FETCH_S)
        with warnings.catch_warnings():
            # The store's memory is read-only, and nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            yield from bucket_tensors(bucket, data)
