"""From rewards and values to advantages and returns: GAE, the plain reward, and group-relative advantages.

An estimator sees the rows of a step at once (`compute_advantage`), or in chunks: then `compute_raw` gives each chunk
its advantages and returns, and where `normalize_advantages` is set one `whiten` over all chunks follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.advantage_config import AdvantageConfig, GAEConfig, GRPOAdvantageConfig
from nemo_rl.algorithms.advantages import adaptive_lambda, gae, group_advantages, last_trained, token_rewards, whiten
from nemo_rl.algorithms.loss.config import ClippedPGLossConfig
from nemo_rl.algorithms.loss.kl import calculate_kl
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdvantageConfig",
    "AdvantageEstimator",
    "GAEConfig",
    "GRPOAdvantageConfig",
    "GRPOAdvantageEstimator",
    "GeneralizedAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "build_advantage_estimator",
    "whiten",
]


class AdvantageEstimator(ABC):
    """Turns the rows of a step into advantages, and into returns where a critic can be trained on them.

    Attributes:
        normalize_advantages: whiten what `compute_raw` gives, over the whole step.
        gives_returns: whether there are returns at all.
    """

    normalize_advantages: bool
    gives_returns: bool = False

    def compute_advantage(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages, float32 `[B, S]`, whitened over these rows if so configured, and returns as `compute_raw`."""
        advantages, returns = self.compute_raw(
            prompt_ids,
            rewards,
            mask,
            values,
            logprobs_policy=logprobs_policy,
            logprobs_reference=logprobs_reference,
            **kwargs,
        )
        return (whiten(advantages, mask) if self.normalize_advantages else advantages), returns

    @abstractmethod
    def compute_raw(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages before whitening, and returns: float32 `[B, S]`, 0 at slots that are not trained.

        A row's numbers depend on that row alone, or on its group, which a chunk must then hold whole.

        Args:
            prompt_ids: ids of the prompts, padded alike, int64 `[B, P]`.
            rewards: of whole rows, `[B]`.
            mask: non-zero at trained tokens of rows that count, `[B, S]`, taken as it is: see
                `advantages.trained_tokens`.
            values: the critic's estimate before each token, `[B, S]`.
            logprobs_policy: of the tokens given their prefix, under the policy that is trained, `[B, S]`.
            logprobs_reference: the same under the reference policy.
            **kwargs: `truncated`, bool `[B]`, for `bootstrap_truncated`; others are ignored.

        Raises:
            UserError: a reward that is not finite in a row with a trained token, or an input that the configuration
                needs and that is None.
        """


class GeneralizedAdvantageEstimator(AdvantageEstimator):
    """GAE, with the KL penalty in the reward if `loss_fn.use_kl_in_reward` says so."""

    gives_returns = True

    def __init__(
        self,
        estimator_config: GAEConfig | Mapping[str, Any],
        loss_config: ClippedPGLossConfig | Mapping[str, Any],
    ):
        self.config = estimator_config if isinstance(estimator_config, GAEConfig) else GAEConfig(**estimator_config)
        self.loss_config = _loss_config(loss_config)
        self.normalize_advantages = self.config.normalize_advantages

    def compute_raw(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageEstimator`. Returns are advantages plus values, with the lambda of the returns."""
        config = self.config
        values = _given("values", values, "adv_estimator.name: gae")
        _check_rewards(rewards, mask)
        kl, trained = None, mask != 0
        if _penalises_reward(self.loss_config):
            why = "loss_fn.use_kl_in_reward"
            kl = calculate_kl(
                _given("logprobs_policy", logprobs_policy, why).where(trained, 0.0),
                _given("logprobs_reference", logprobs_reference, why).where(trained, 0.0),
                config.reward_kl_type,
                self.loss_config.kl_input_clamp_value,
                self.loss_config.kl_output_clamp_value,
            )
        per_token = token_rewards(rewards, mask, kl, self.loss_config.reference_policy_kl_penalty)
        final_values = None
        if config.bootstrap_truncated:
            truncated = _given("truncated", kwargs.get("truncated"), "adv_estimator.bootstrap_truncated")
            at_end = values.where(last_trained(mask), 0.0).sum(1)
            final_values = at_end.where(truncated.reshape(-1) != 0, 0.0)

        def estimate(gae_lambda: float | Tensor) -> Tensor:
            return gae(per_token, values, mask, config.gae_gamma, gae_lambda, final_values)

        lambda_value = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
        lambda_policy: float | Tensor = (
            config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy
        )
        if config.length_adaptive_alpha > 0:
            lambda_policy = adaptive_lambda(mask, config.length_adaptive_alpha)
        for_returns = estimate(lambda_value)
        advantages = for_returns if lambda_policy is lambda_value else estimate(lambda_policy)
        returns = (for_returns + values.double()).where(trained, 0.0)
        return advantages.float(), returns.float()


class RawRewardAdvantageEstimator(AdvantageEstimator):
    """The row's reward at each of its trained tokens. It has no regression target, so there are no returns."""

    def __init__(
        self,
        estimator_config: GAEConfig | Mapping[str, Any],
        loss_config: ClippedPGLossConfig | Mapping[str, Any],
    ):
        config = estimator_config if isinstance(estimator_config, GAEConfig) else GAEConfig(**estimator_config)
        _refuse_kl_in_reward("raw_reward", loss_config)
        self.normalize_advantages = config.normalize_advantages

    def compute_raw(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageEstimator`. Reads `rewards` and `mask` only."""
        _check_rewards(rewards, mask)
        return rewards.float().reshape(-1, 1).where(mask != 0, 0.0), None


class GRPOAdvantageEstimator(AdvantageEstimator):
    """Rewards relative to the other rows with the same prompt, the same at each trained token of a row.

    Rows without a trained token are no part of their group. A row alone in its group has nothing to be compared with:
    its advantage is 0.
    """

    normalize_advantages = False

    def __init__(
        self,
        estimator_config: GRPOAdvantageConfig | Mapping[str, Any],
        loss_config: ClippedPGLossConfig | Mapping[str, Any],
    ):
        is_model = isinstance(estimator_config, GRPOAdvantageConfig)
        self.config = estimator_config if is_model else GRPOAdvantageConfig(**estimator_config)
        _refuse_kl_in_reward("grpo", loss_config)

    def compute_raw(
        self,
        prompt_ids: Tensor | None,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor | None = None,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageEstimator`. Rows with equal `prompt_ids`, padding included, form a group."""
        prompt_ids = _given("prompt_ids", prompt_ids, "adv_estimator.name: grpo")
        _check_rewards(rewards, mask)
        trained = mask != 0
        _, groups = prompt_ids.unique(dim=0, return_inverse=True)
        per_row = group_advantages(
            rewards.reshape(-1),
            groups,
            trained.any(1),
            leave_one_out=self.config.use_leave_one_out_baseline,
            divide_by_std=self.config.normalize_rewards,
        )
        return per_row.float()[:, None].where(trained, 0.0), None


def build_advantage_estimator(
    config: AdvantageConfig | Mapping[str, Any], loss_config: ClippedPGLossConfig | Mapping[str, Any]
) -> AdvantageEstimator:
    """The estimator that `config.name` says.

    Raises:
        ValueError: another name, or `loss_fn.use_kl_in_reward` with an estimator that has no token rewards.
    """
    name = config.get("name", "gae")
    estimators: dict[str, Any] = {
        "gae": GeneralizedAdvantageEstimator,
        "raw_reward": RawRewardAdvantageEstimator,
        "grpo": GRPOAdvantageEstimator,
    }
    if name not in estimators:
        raise UserError(f"adv_estimator.name: {name!r} is none of {', '.join(estimators)}")
    return estimators[name](config, loss_config)


def _loss_config(loss_config: ClippedPGLossConfig | Mapping[str, Any]) -> ClippedPGLossConfig:
    return loss_config if isinstance(loss_config, ClippedPGLossConfig) else ClippedPGLossConfig(**loss_config)


def _penalises_reward(loss_config: ClippedPGLossConfig) -> bool:
    return loss_config.use_kl_in_reward and loss_config.reference_policy_kl_penalty > 0


def _refuse_kl_in_reward(name: str, loss_config: ClippedPGLossConfig | Mapping[str, Any]) -> None:
    if _penalises_reward(_loss_config(loss_config)):
        raise UserError(
            f"loss_fn.use_kl_in_reward: true, but adv_estimator.name: {name} has no token rewards to take the KL "
            "penalty off; set it to false, and the penalty is in the loss"
        )


def _given(name: str, tensor: Tensor | None, why: str) -> Tensor:
    if tensor is None:
        raise UserError(f"{name}: {why} needs this column, and it is not there")
    return tensor


def _check_rewards(rewards: Tensor, mask: Tensor) -> None:
    """One reward that is NaN would spread over the whole step when advantages are whitened."""
    wrong = ~rewards.reshape(-1).isfinite() & (mask != 0).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"rewards: row {row} has {rewards.reshape(-1)[row].item()}; a reward must be finite, or the row be left out"
        )
