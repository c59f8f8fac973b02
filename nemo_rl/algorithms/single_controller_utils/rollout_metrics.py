"""What a step's samples were like, from the tags of their rows."""

from __future__ import annotations

from nemo_rl.data_plane.interfaces import KVBatchMeta


def rollout_metrics(rows: KVBatchMeta, version: int) -> dict[str, float]:
    """Means over the rows of a step that trains with weights of `version`.

    `response_tokens_mean` and `_max`, `truncated` (the part that was cut at its limit), `staleness_mean` and `_max`
    (versions between the weights that drew a sample and those that are trained), `turns_mean`; what no row has a tag
    for is left out.
    """
    tags = rows.tags or []
    metrics: dict[str, float] = {}
    for name, tag in (("response_tokens", "response_tokens"), ("turns", "turns"), ("truncated", "truncated")):
        values = [float(entry[tag]) for entry in tags if tag in entry]
        if values:
            metrics[f"{name}_mean"] = sum(values) / len(values)
            metrics[f"{name}_max"] = max(values)
    if "truncated_mean" in metrics:
        metrics["truncated"] = metrics.pop("truncated_mean")
        del metrics["truncated_max"]
    lags = [version - int(entry["weight_version"]) for entry in tags if "weight_version" in entry]
    if lags:
        metrics |= {"staleness_mean": sum(lags) / len(lags), "staleness_max": max(lags)}
    return metrics
