"""Attention per document against one call per document, written out in full."""

import math

import pytest
import torch
from torch import nn

from nemo_rl.models.engine import attention
from nemo_rl.models.engine.attention import DocumentGroup, Documents, per_document_attention

LENGTHS = [3, 3, 5, 7]
GROUPS = (DocumentGroup(0, 6, 2), DocumentGroup(6, 11, 1), DocumentGroup(11, 18, 1))


def reference(q, k, v, window: int | None, softcap: float | None) -> torch.Tensor:
    """q `[H, T, D]`, k and v `[KV, T, D]` to `[T, H, D]`, one document, head and query at a time."""
    out = torch.zeros(q.size(1), q.size(0), q.size(2))
    start = 0
    for length in LENGTHS:
        for head in range(q.size(0)):
            kv = head // (q.size(0) // k.size(0))
            for i in range(start, start + length):
                first = start if window is None else max(start, i - window + 1)
                scores = (k[kv, first : i + 1] @ q[head, i]) / math.sqrt(q.size(2))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[i, head] = scores.softmax(0) @ v[kv, first : i + 1]
        start += length
    return out


@pytest.mark.parametrize("explicit_up_to", [0, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0), (4, 2.0), (100, None)])
def test_matches_each_document_alone(
    monkeypatch: pytest.MonkeyPatch, explicit_up_to: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(attention, "_EXPLICIT_UP_TO", {torch.float32: explicit_up_to})
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 18, 8), torch.randn(kv_heads, 18, 8), torch.randn(kv_heads, 18, 8)
    out, _ = per_document_attention(
        nn.Identity(),
        q[None],
        k[None],
        v[None],
        None,
        sliding_window=window,
        softcap=softcap,
        documents=Documents(GROUPS),
    )
    torch.testing.assert_close(out[0], reference(q, k, v, window, softcap), rtol=1e-5, atol=1e-5)


def test_rounded_lengths_change_no_output_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LENGTH_MULTIPLE", 4)
    torch.manual_seed(0)
    # Positions 18 and 19 belong to no document.
    tensors = [torch.randn(1, heads, 20, 8, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, 20, 4, 8)
    outputs, gradients = [], []
    for rounded in (False, True):
        monkeypatch.setattr(attention, "compiles_per_shape", lambda *_, rounded=rounded: rounded)
        out, _ = per_document_attention(nn.Identity(), *tensors, None, documents=Documents(GROUPS))
        outputs.append(out)
        gradients.append(torch.autograd.grad((out * weights).sum(), tensors))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert (outputs[1][:, 18:] == 0).all() and (gradients[1][0][:, :, 18:] == 0).all()


def test_a_model_that_hides_the_documents_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="documents"):
        per_document_attention(nn.Identity(), x, x, x, None)


def test_attention_sinks_are_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="sinks"):
        per_document_attention(nn.Identity(), x, x, x, None, documents=Documents(GROUPS), s_aux=torch.ones(1))
