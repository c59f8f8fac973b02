"""A critic as plainly as it can be written: what the engine's values and updates are compared with.

A decoder and a linear layer; rows go through one at a time, whole, without packing; the loss is written out.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import make_model_dir, make_rows
from torch import Tensor, nn
from transformers import AutoModel

CLIP, SCALE = 0.2, 0.8


def make_critic_dir(path: Path, *, seed: int = 0) -> Path:
    """A tiny model with a random value head beside it; returns `path`."""
    make_model_dir(path, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    head = {"weight": torch.randn(1, 32, generator=generator) * 0.3, "bias": torch.randn(1, generator=generator)}
    save_file(head, path / "value_head.safetensors")
    return path


def make_value_rows(count: int, *, seed: int, max_length: int = 40) -> dict[str, Tensor]:
    """Rows with random `returns` and old `values`, not 0 anywhere, padding included; the first row has no weight."""
    rows = make_rows(count, seed=seed, max_length=max_length)
    rows["sample_mask"][0] = 0.0
    generator = torch.Generator().manual_seed(1000 + seed)
    for name in ("returns", "values"):
        rows[name] = torch.randn(rows["input_ids"].shape, generator=generator)
    return rows


class PlainCritic(nn.Module):
    """The decoder of a model directory and its value head."""

    def __init__(self, model_dir: Path):
        super().__init__()
        self.model = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
        self.value_head = nn.Linear(self.model.config.hidden_size, 1)
        self.value_head.load_state_dict(load_file(model_dir / "value_head.safetensors"))

    def row_values(self, ids: Tensor) -> Tensor:
        """`[T]`: before token t stands the head's output at t - 1, before the first stands 0."""
        out = self.value_head(self.model(input_ids=ids[None]).last_hidden_state[0]).squeeze(-1)
        return torch.cat([torch.zeros(1), out[:-1]])

    @torch.no_grad()
    def values(self, rows: dict[str, Tensor]) -> Tensor:
        """`[B, S]`."""
        out = torch.zeros(rows["input_ids"].shape)
        for i, length in enumerate(rows["input_lengths"].tolist()):
            out[i, :length] = self.row_values(rows["input_ids"][i, :length])
        return out

    def step(self, rows: dict[str, Tensor], optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, float]:
        """One update by the clipped value loss; the loss and the gradient norm before clipping."""
        optimizer.zero_grad()
        count = float((rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:].sum())
        total = 0.0
        for i, length in enumerate(rows["input_lengths"].tolist()):
            if rows["sample_mask"][i] == 0:
                continue
            value = self.row_values(rows["input_ids"][i, :length])
            target, old = rows["returns"][i, :length], rows["values"][i, :length]
            near = torch.minimum(torch.maximum(value, old - CLIP), old + CLIP)
            worst = torch.maximum((value - target) ** 2, (near - target) ** 2)
            loss = 0.5 * SCALE * worst[rows["token_mask"][i, :length] > 0].sum() / count
            loss.backward()
            total += loss.item()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in self.parameters() if p.grad is not None))
        nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        optimizer.step()
        return total, float(norm)
