"""Draws against the distribution they are drawn from, with fixed seeds.

Not covered here: GPUs.
"""

import numpy as np
import torch

from nemo_rl.models.generation.sampling import SamplingRows, draw_tokens, uniform

DRAWS = 20_000
LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -30.0, 1.5, -0.5])


def rows(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None) -> SamplingRows:
    """One seed per row, the position fixed."""
    return SamplingRows(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, np.iinfo(np.int64).max if top_k is None else top_k),
        seeds=np.arange(count, dtype=np.uint64),
        positions=np.full(count, 5),
    )


def frequencies(settings: SamplingRows) -> torch.Tensor:
    tokens, _ = draw_tokens(LOGITS.expand(DRAWS, -1), settings)
    return torch.bincount(tokens, minlength=len(LOGITS)).double()


def chi_square(found: torch.Tensor, probabilities: torch.Tensor) -> float:
    kept = probabilities > 1e-9
    assert found[~kept].sum() == 0
    expected = probabilities[kept] * found.sum()
    return float(((found[kept] - expected) ** 2 / expected).sum())


def test_numbers_are_uniform_and_independent_of_neighbours():
    seeds, positions = (x.ravel() for x in np.meshgrid(np.arange(200), np.arange(100)))
    numbers = uniform(seeds.astype(np.uint64), positions)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 86  # 49 degrees of freedom, 0.1 %
    table = numbers.reshape(100, 200)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert len(np.unique(numbers)) > 19_900
    assert uniform(seeds[7:8].astype(np.uint64), positions[7:8])[0] == numbers[7]


def test_frequencies_match_the_distribution():
    for temperature in (1.0, 0.5, 2.0):
        probabilities = torch.softmax(LOGITS.double() / temperature, -1)
        assert chi_square(frequencies(rows(DRAWS, temperature)), probabilities) < 24.3  # 7 degrees of freedom, 0.1 %


def test_top_k_and_top_p_cut_and_renormalise():
    probabilities = torch.softmax(LOGITS.double(), -1)
    for top_k, top_p, kept in (
        (3, 1.0, [3, 6, 1]),
        (1, 1.0, [3]),
        (None, 0.5, [3, 6]),  # 0.40 is too little, 0.40 + 0.24 reaches it
        (None, 0.39, [3]),
        (2, 0.9, [3, 6]),  # after the cut to two, 0.62 is too little
        (2, 0.5, [3]),
    ):
        cut = torch.zeros_like(probabilities)
        cut[kept] = probabilities[kept]
        assert chi_square(frequencies(rows(DRAWS, top_p=top_p, top_k=top_k)), cut / cut.sum()) < 13.9


def test_rows_keep_their_own_settings():
    settings = rows(4)
    settings.temperature[0] = 0
    settings.top_k[1] = 1
    settings.top_p[2] = 1e-6
    tokens, logprobs = draw_tokens(LOGITS.expand(4, -1), settings)
    alone, _ = draw_tokens(LOGITS.expand(4, -1), rows(4))
    assert tokens[:3].tolist() == [3, 3, 3]
    assert tokens[3] == alone[3]
    expected = torch.log_softmax(LOGITS, -1)[tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def test_what_is_impossible_is_never_drawn():
    logits = torch.full((DRAWS, 4), float("-inf"))
    logits[:, 1:3] = 0.0
    tokens, logprobs = draw_tokens(logits, rows(DRAWS))
    assert set(tokens.tolist()) == {1, 2}
    torch.testing.assert_close(logprobs, torch.full((DRAWS,), -np.log(2.0), dtype=torch.float32))


def test_a_row_that_is_not_finite_has_no_finite_logprob():
    logits = torch.zeros(3, 4)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    _, logprobs = draw_tokens(logits, rows(3))
    assert torch.isfinite(logprobs).tolist() == [False, False, True]
