"""What a critic can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl.algorithms.loss.interfaces import LossFunction
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class ValueOutputSpec(TypedDict):
    """What `get_values` gives."""

    values: Tensor
    """Float32 `[B, S]`: column t is the estimate before token t, column 0 and padding are 0."""


class ValueInterface(ABC):
    """A model that estimates, before every token, the reward still to come."""

    @abstractmethod
    def get_values(
        self, data: BatchedDataDict, timer: Timer | None = None, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """A batch of `ValueOutputSpec`, in the order of `data`."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Optimizer steps of `gbs` rows; `loss`, `grad_norm`, `all_mb_metrics`."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Before training."""

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Before `get_values`."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """After training."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Copies the state and writes it in the background."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the workers; whether they went in good order."""
