"""SFT as plainly as it can be written: what a run's losses are compared with.

No line of the package is used: tokens are put together by hand for the tokenizer T0 and the template of `tiny`, and
rows go through the model one at a time, whole, without packing.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

START_OF_TURN, END_OF_TURN = 259, 260


def plain_tokens(messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids and whether each is trained: an assistant's text and the tag that closes it."""
    ids: list[int] = []
    trained: list[bool] = []
    for message in messages:
        head = [START_OF_TURN, *f"{message['role']}\n".encode()]
        body = [*message["content"].encode(), END_OF_TURN]
        ids += [*head, *body, *b"\n"]
        trained += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False]
    return ids, trained


def read_rows(path: Path) -> dict[str, tuple[list[int], list[bool]]]:
    """Tokens of each row of a JSONL file, by its `id` as text."""
    rows = (json.loads(line) for line in path.read_text().split("\n") if line)
    return {str(row["id"]): plain_tokens(row["messages"]) for row in rows}


def loss_sum(model: PreTrainedModel, ids: list[int], trained: list[bool]) -> torch.Tensor:
    """Summed negative log-likelihood of the trained tokens of one row."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    targets = torch.tensor([token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)])
    return F.cross_entropy(logits, targets[1:], reduction="sum")


@torch.no_grad()
def plain_loss(model_dir: Path, rows: Iterable[tuple[list[int], list[bool]]]) -> float:
    """Mean over all trained tokens of the rows, for the model as it is on the disk."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    pairs = list(rows)
    return sum(loss_sum(model, *row).item() for row in pairs) / sum(sum(trained) for _, trained in pairs)


def plain_sft(
    model_dir: Path,
    steps: Sequence[Sequence[tuple[list[int], list[bool]]]],
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
) -> tuple[list[float], PreTrainedModel]:
    """AdamW over the given rows of each step; the loss of each step before its update, and the trained model."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    out = []
    for rows in steps:
        optimizer.zero_grad()
        count = sum(sum(trained) for _, trained in rows)
        parts = [loss_sum(model, *row) / count for row in rows]
        for part in parts:
            part.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        out.append(sum(part.item() for part in parts))
    return out, model
