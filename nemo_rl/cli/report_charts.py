"""Which curves stand on the report of a run, SFT and PPO alike; a chart without any of its lines is left out."""

from __future__ import annotations

from nemo_rl.cli.charts import Chart, Line
from nemo_rl.cli.metrics_log import MetricsLog, Series

PHASES = {
    "exposed_generation": "waiting for samples",
    "value_training": "critic",
    "policy_training": "policy",
    "weight_sync": "weights to the sampler",
    "policy_logprobs": "log-probs",
    "value_inference": "values",
    "advantage_calculation": "advantages",
    "checkpointing": "saving",
}


def dropped_series(log: MetricsLog) -> list[Series]:
    """The counts of dropped rows so far, one series per reason."""
    return [series for name, series in sorted(log.series.items()) if name.startswith("dropped/")]


def main_charts_of(log: MetricsLog) -> list[Chart]:
    """The charts whose metrics the run has, the most wanted first."""

    def chart(title: str, unit: str, *lines: Line | None, from_zero: bool = False) -> Chart | None:
        present = tuple(line for line in lines if line is not None)
        return Chart(title, unit, present, from_zero) if present else None

    def line(label: str, name: str, smooth: bool = False) -> Line | None:
        series = log.series.get(name)
        return Line(label, series, smooth) if series else None

    dropped = [Line(series.name.removeprefix("dropped/"), series) for series in dropped_series(log)]
    phases = [line(label, f"timing/{name}", smooth=True) for name, label in PHASES.items()]
    found = (
        chart(
            "Reward",
            "mean over the samples of a step",
            line("training", "reward_mean", smooth=True),
            line("validation", "val_reward"),
        ),
        chart(
            "Loss",
            "nats per trained token",
            line("training", "loss", smooth=True),
            line("validation", "val_loss"),
        ),
        chart("Critic's loss", "squared error", line("value loss", "critic/loss", smooth=True), from_zero=True),
        chart(
            "Explained variance",
            "1 = a perfect critic",
            line("explained variance", "critic/explained_var", smooth=True),
        ),
        chart(
            "KL",
            "nats per token",
            line("trainer to sampler", "policy_kl_error", smooth=True),
            line("sampler to trainer", "gen_kl_error", smooth=True),
            line("policy to reference", "kl_penalty", smooth=True),
        ),
        chart(
            "Length of a response",
            "tokens",
            line("mean", "response_tokens_mean", smooth=True),
            line("longest", "response_tokens_max"),
            from_zero=True,
        ),
        chart(
            "Staleness",
            "versions",
            line("mean", "staleness_mean"),
            line("most", "staleness_max"),
            from_zero=True,
        ),
        chart("Learning rate", "", line("lr", "lr"), from_zero=True),
        chart("Gradient norm", "before clipping", line("grad norm", "grad_norm", smooth=True), from_zero=True),
        chart(
            "Speed",
            "tokens per second",
            line("all", "tokens_per_second", smooth=True),
            line("trained", "valid_tokens_per_second", smooth=True),
            from_zero=True,
        ),
        chart(
            "Time of a step",
            "seconds",
            line("whole step", "total_step_time", smooth=True),
            line("model", "policy_time", smooth=True),
            line("loading", "loader_latency_max", smooth=True),
            from_zero=True,
        ),
        chart("Phases of a step", "seconds", *phases[:4], from_zero=True),
        chart("More phases of a step", "seconds", *phases[4:], from_zero=True),
        chart("Dropped", "total so far", *dropped[:4], from_zero=True),
    )
    return [entry for entry in found if entry is not None]
