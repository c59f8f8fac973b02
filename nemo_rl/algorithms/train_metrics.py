"""A training result as flat numbers for the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.algorithms.loss.interfaces import MetricNormalizer, metric_rule, reduce_metric

# What the worker adds to the metrics of the loss, the same in all forward passes of a step.
_STEP_METRIC_RULES = dict.fromkeys(("lr", "wd", "global_valid_seqs", "global_valid_toks"), MetricNormalizer.LAST)

# What the driver adds, if it knows it.
_STEP_RESULTS = ("total_flops", "num_ranks", "theoretical_tflops", "engine_busy")


def train_metrics(
    train_results: Mapping[str, Any], rules: Mapping[str, MetricNormalizer] | None = None
) -> dict[str, Any]:
    """`loss`, `grad_norm` and each metric of the loss, reduced by the rule that the loss states for it."""
    stated = {**(rules or {}), **_STEP_METRIC_RULES}
    metrics: dict[str, Any] = {
        key: reduce_metric(metric_rule(key, stated), values) for key, values in train_results["all_mb_metrics"].items()
    }
    metrics |= {f"moe/{key}": value for key, value in train_results.get("moe_metrics", {}).items()}
    metrics |= {key: train_results[key] for key in _STEP_RESULTS if key in train_results}
    return metrics | {"loss": float(train_results["loss"]), "grad_norm": float(train_results["grad_norm"])}
