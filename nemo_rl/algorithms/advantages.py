"""The arithmetic of advantages: token rewards, GAE, group baselines and whitening, each for all rows at once.

Masks are `[B, S]`, non-zero at trained tokens. What stands in other slots takes no part, NaN and inf included: slots
are selected away, not multiplied by zero, and come out as 0. All of it is double, but for what `whiten` gives.
"""

import torch
from torch import Tensor


def trained_tokens(token_mask: Tensor, row_mask: Tensor) -> Tensor:
    """The mask that the estimators take: trained tokens of the rows that count, bool `[B, S]`.

    Column 0 has no prediction, so it is never a trained token. `row_mask [B]` is 0 for rows that are left out.
    """
    mask = (token_mask != 0) & (row_mask != 0)[:, None]
    mask[:, 0] = False
    return mask


def last_trained(mask: Tensor) -> Tensor:
    """True at the last trained token of each row, bool `[B, S]`; nowhere in a row without one."""
    trained = mask != 0
    return trained & (trained.cumsum(1) == trained.sum(1, keepdim=True))


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """The reward of each token, double `[B, S]`: that of the row at its last trained token, less the KL penalty.

    Args:
        rewards: of whole rows, `[B]`. A row without a trained token gets none.
        mask: trained tokens, `[B, S]`.
        kl: KL divergence from the reference policy per token, `[B, S]`; None = no penalty.
        kl_coefficient: its factor.
    """
    out = rewards.double().reshape(-1, 1).where(last_trained(mask), 0.0)
    if kl is not None:
        out = out - kl_coefficient * kl.double().where(mask != 0, 0.0)
    return out


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    final_values: Tensor | None = None,
) -> Tensor:
    """Generalized advantage estimates, double `[B, S]` (Schulman et al., 2015), not whitened; 0 at masked slots.

    A step goes from one trained token to the next trained one, over any gap between them: `delta_t = r_t + gamma *
    v_next - v_t` and `A_t = delta_t + gamma * lambda * A_next`, with `A_next = 0` behind the last trained token.

    Args:
        token_rewards: `[B, S]`.
        values: the estimate before each token, `[B, S]`.
        mask: trained tokens, `[B, S]`.
        gamma: discount per trained token.
        gae_lambda: one number, or one per row `[B]`.
        final_values: value of the state behind the last trained token of each row, `[B]`; None = 0, the end.
    """
    out = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    columns = (mask != 0).any(0).nonzero().squeeze(1)
    if not len(columns):
        return out
    # By time first, `[T, B]`, as the loop walks over time.
    trained, rewards, values = (column[:, columns].t().contiguous() for column in (mask != 0, token_rewards, values))
    values = values.double().where(trained, 0.0)
    # The value of the next trained token; behind the last one, that of the state the row ends in.
    next_values = torch.empty_like(values)
    next_value = torch.zeros_like(values[0]) if final_values is None else final_values.double()
    for t in reversed(range(len(columns))):
        next_values[t] = next_value
        next_value = values[t].where(trained[t], next_value)
    advantages = (rewards.double() + gamma * next_values - values).where(trained, 0.0)
    # Over a gap the accumulator is carried: 0 + 1 * A_next.
    decay = torch.as_tensor(gamma * gae_lambda, dtype=torch.float64).to(mask.device).where(trained, 1.0)
    for t in reversed(range(len(columns) - 1)):
        advantages[t].addcmul_(decay[t], advantages[t + 1])
    out[:, columns] = advantages.where(trained, 0.0).t()
    return out


def adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """`1 - 1 / max(alpha * length, 1)`, double `[B]`; the length of a row is its number of trained tokens."""
    return 1 - 1 / (alpha * (mask != 0).sum(1).double()).clamp(min=1)


def whiten(advantages: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(A - mean) / sqrt(variance + epsilon)` over the trained tokens, float32, 0 elsewhere.

    The variance is that of the population, so one trained token gives 0, as equal ones do. Shapes are any two alike:
    to whiten a step that was made in chunks, put the advantages of all chunks into one call.
    """
    trained = mask != 0
    kept = advantages.double().where(trained, 0.0)
    count = trained.sum().clamp(min=1)
    centred = (kept - kept.sum() / count).where(trained, 0.0)
    variance = centred.square().sum() / count
    return (centred * (variance + epsilon).rsqrt()).float()


def group_advantages(
    rewards: Tensor, groups: Tensor, counts: Tensor, *, leave_one_out: bool, divide_by_std: bool, epsilon: float = 1e-6
) -> Tensor:
    """Each row's reward less the mean of its group, double `[B]` (Shao et al., 2024).

    A row that does not count, and one that has no other in its group, gets 0.

    Args:
        rewards: of whole rows, `[B]`.
        groups: number of the group of each row, int64 `[B]`, below B.
        counts: rows that take part, bool `[B]`.
        leave_one_out: the mean is that of the other rows (Ahmadian et al., 2024), which is `n / (n - 1)` times as far.
        divide_by_std: divide by the group's sample standard deviation (over `n - 1`) plus `epsilon`.
    """
    rewards = rewards.double().where(counts, 0.0)

    def total(numbers: Tensor) -> Tensor:
        return numbers.new_zeros(numbers.size(0)).index_add(0, groups, numbers)[groups]

    members = total(counts.double())
    centred = (rewards - total(rewards) / members.clamp(min=1)).where(counts, 0.0)
    others = (members - 1).clamp(min=1)
    out = centred * members / others if leave_one_out else centred
    if divide_by_std:
        out = out / ((total(centred.square()) / others).sqrt() + epsilon)
    return out
