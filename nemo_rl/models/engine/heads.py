"""What a model says about a pack. A role is a head plus a loss; everything else is shared."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from nemo_rl.algorithms.loss.interfaces import LossInputType
from nemo_rl.models.engine.microbatch import Pack
from nemo_rl.utils.phases import phase

# Rows of logits that are turned into log-probabilities at once: bounds the float32 copy at this many rows of the
# vocabulary.
_LOGIT_ROWS = 2048


LAYERS, HEAD = "forward layers", "head and loss"
"""Phases of a forward pass beside its attention; the layers' includes embeddings and norms."""


class Head(Protocol):
    """Maps a pack to one number per target.

    Attributes:
        input_type: the kind of loss that these numbers are for.
    """

    @property
    def input_type(self) -> LossInputType: ...

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        """Float32 `[K]`, in the order of `pack.targets`, with a graph back to the model's parameters."""
        ...


@dataclass
class LMHead:
    """Log-probability of each target given its document so far, in nats.

    The model's own forward runs with the wanted positions as `logits_to_keep`, so that its scaling and soft-capping of
    logits stay in place and no other position goes through the vocabulary projection.

    Attributes:
        temperature: what the logits are divided by, as where the targets were sampled.
    """

    temperature: float = 1.0
    input_type = LossInputType.LOGPROB

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        with phase(LAYERS):
            logits = model(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                use_cache=False,
                logits_to_keep=pack.head_positions,
                documents=pack.documents,
            ).logits[0, : len(pack.targets)]
        with phase(HEAD):
            parts = [
                -F.cross_entropy(self._scaled(rows.float()), targets, reduction="none")
                for rows, targets in zip(logits.split(_LOGIT_ROWS), pack.targets.split(_LOGIT_ROWS), strict=True)
            ]
            return torch.cat(parts)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1.0 else logits / self.temperature


class ValueHead:
    """The critic's estimate *before* each target: the value head at the position that comes before it.

    What the head says at position t - 1 belongs to token t. A target in column t has its head position at t - 1
    already, so laying the numbers out by column is the whole right shift: `values[:, 0]` is 0 and `values[:, t]` is
    the head's output at t - 1 of the same document, in inference and in the loss, wherever a row stands in its pack.
    """

    input_type = LossInputType.LOGIT

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        with phase(LAYERS):
            values = model(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                head_positions=pack.head_positions,
                documents=pack.documents,
            )
        return values[: len(pack.targets)]


def watch_projection(model: nn.Module) -> list[RemovableHandle]:
    """Counts the vocabulary projection, inside a model's forward, as `HEAD` until the handles are removed."""
    projection = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if projection is None:
        return []
    inside = ExitStack()
    return [
        projection.register_forward_pre_hook(lambda *_: inside.enter_context(phase(HEAD))),
        projection.register_forward_hook(lambda *_: inside.close(), always_call=True),
    ]
