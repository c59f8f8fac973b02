"""What a model says about a pack. A role is a head plus a loss; everything else is shared."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.engine.microbatch import Pack

# Rows of logits that are turned into log-probabilities at once: bounds the float32 copy at this many rows of the
# vocabulary.
_LOGIT_ROWS = 2048


class Head(Protocol):
    """Maps a pack to one number per target."""

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        """Float32 `[K]`, in the order of `pack.targets`, with a graph back to the model's parameters."""
        ...


class LMHead:
    """Log-probability of each target given its document so far, in nats.

    The model's own forward runs with the wanted positions as `logits_to_keep`, so that its scaling and soft-capping of
    logits stay in place and no other position goes through the vocabulary projection.
    """

    def __call__(self, model: nn.Module, pack: Pack) -> Tensor:
        logits = model(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            logits_to_keep=pack.head_positions,
            documents=pack.documents,
        ).logits[0, : len(pack.targets)]
        parts = [
            -F.cross_entropy(rows.float(), targets, reduction="none")
            for rows, targets in zip(logits.split(_LOGIT_ROWS), pack.targets.split(_LOGIT_ROWS), strict=True)
        ]
        return torch.cat(parts)
