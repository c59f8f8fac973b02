"""`onehop report`: the curves of a run as one HTML file that needs no network."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nemo_rl.cli.charts import Chart
    from nemo_rl.cli.metrics_log import MetricsLog, Series


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Log directory of a run, with metrics.jsonl.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default: RUN_DIR/report.html", show_default=False)
    ] = None,
) -> None:
    """Write one HTML page with the curves of a run: loss, validation, learning rate, gradients, speed, dropped rows."""
    from rich.console import Console

    from nemo_rl.cli.console import print_line
    from nemo_rl.cli.metrics_log import find_metrics_file, read_metrics

    source = find_metrics_file(run_dir)
    target = out or run_dir / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report_page(read_metrics(source), title="/".join(run_dir.resolve().parts[-2:])), encoding="utf-8")
    print_line(Console(), str(target))


def report_page(log: MetricsLog, *, title: str) -> str:
    """The whole page as HTML text."""
    import json
    from importlib.resources import files
    from string import Template

    from nemo_rl import __version__
    from nemo_rl.cli import charts
    from nemo_rl.cli.report_charts import main_charts_of
    from nemo_rl.cli.report_profile import profile_table
    from nemo_rl.utils.logger import PROFILE_FILE, SAMPLES_FILE

    main_charts = main_charts_of(log)
    shown = {line.series.name for chart in main_charts for line in chart.lines}
    rest = [
        charts.Chart(name, "", (charts.Line(name, series, smooth=True),))
        for name, series in sorted(log.series.items())
        if name not in shown and len(series.steps) > 1 and len(set(series.values)) > 1
    ]
    # "</" inside a script element would end it.
    points = json.dumps([charts.chart_points(chart) for chart in main_charts + rest]).replace("</", "<\\/")
    figures = [_figure(index, chart) for index, chart in enumerate(main_charts + rest)]
    more = ""
    if rest:
        body = "".join(figures[len(main_charts) :])
        more = f'<details><summary>{len(rest)} more curves</summary><div class="charts">{body}</div></details>'
    template = files("nemo_rl.cli").joinpath("report_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(title),
        subtitle=escape(_subtitle(log)),
        tiles="".join(_tiles(log)),
        charts="".join(figures[: len(main_charts)]),
        profile=profile_table(log.path.with_name(PROFILE_FILE)),
        samples=_samples(log.path.with_name(SAMPLES_FILE)),
        more=more,
        table=_table(log),
        points=points,
        version=escape(__version__),
        source=escape(str(log.path)),
        left=charts.LEFT,
        right=charts.RIGHT,
        width=charts.WIDTH,
    )


def _figure(index: int, chart: Chart) -> str:
    from nemo_rl.cli.charts import chart_svg

    keys = ""
    if len(chart.lines) > 1:
        names = (f'<span><i class="tone{k}"></i>{escape(line.label)}</span>' for k, line in enumerate(chart.lines))
        keys = f'<span class="keys">{"".join(names)}</span>'
    return (
        f'<figure data-chart="{index}"><figcaption><b>{escape(chart.title)}</b>'
        f'<span class="unit">{escape(chart.unit)}</span>{keys}</figcaption>'
        f'{chart_svg(chart)}<div class="readout">step</div></figure>'
    )


def _samples(path: Path) -> str:
    """The table of sampled answers that a PPO or GRPO run leaves beside its metrics; "" without one."""
    import json

    if not path.is_file():
        return ""
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = "".join(
        f"<tr><td>{escape(answer['prompt'])}</td><td>{escape(answer['response'])}</td><td>{answer['reward']:g}</td></tr>"
        for answer in answers
    )
    step = f" of step {answers[0]['step']:,}" if answers else ""
    return (
        f"<details open><summary>Sampled answers{step}</summary><div class='scroll'><table class='samples'>"
        f"<tr><th>prompt</th><th>answer</th><th>reward</th></tr>{rows}</table></div></details>"
    )


def _subtitle(log: MetricsLog) -> str:
    """Model, data and batch of the run, from the config beside its metrics, and when it ran."""
    from datetime import datetime

    import yaml

    from nemo_rl.utils.logger import CONFIG_FILE

    facts = []
    config_file = log.path.with_name(CONFIG_FILE)
    if config_file.is_file():
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        policy = config["policy"]
        facts.append(f"{policy['model_name']} on {config['data']['train']['path']}")
        facts.append(f"{policy['train_global_batch_size']} rows a step")
    if log.times:
        first, last = (datetime.fromtimestamp(pick(log.times.values())) for pick in (min, max))
        facts.append(
            f"{first:%Y-%m-%d %H:%M} to {last:%H:%M}"
            if first.date() == last.date()
            else f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
        )
    return " · ".join(facts)


def _tiles(log: MetricsLog) -> list[str]:
    from nemo_rl.cli.progress import format_seconds
    from nemo_rl.cli.report_charts import dropped_series

    tiles = []

    def tile(name: str, value: str, note: str = "", *, bad: bool = False) -> None:
        small = f"<small>{escape(note)}</small>" if note else ""
        tiles.append(
            f'<div class="tile{" bad" if bad else ""}"><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>'
        )

    loss = log.series.get("loss")
    steps = loss.steps if loss else tuple(sorted({s for series in log.series.values() for s in series.steps}))
    seconds = log.series.get("total_step_time")
    took = f"{format_seconds(sum(v for _, v in seconds.finite))} of training" if seconds else ""
    tile("Steps", f"{steps[-1]:,}", took)
    reward = log.series.get("reward_mean")
    if reward and reward.finite:
        tile("Reward", f"{reward.finite[-1][1]:.3f}", f"from {reward.finite[0][1]:.3f}")
    val_reward = log.series.get("val_reward")
    if val_reward and val_reward.finite:
        step, best = max(val_reward.finite, key=lambda point: point[1])
        tile("Validation reward", f"{val_reward.finite[-1][1]:.3f}", f"best {best:.3f} at step {step:,}")
    if loss and loss.finite and not reward:
        tile("Loss", f"{loss.finite[-1][1]:.4f}", f"from {loss.finite[0][1]:.4f}")
    val = log.series.get("val_loss")
    if val and val.finite:
        step, best = min(val.finite, key=lambda point: point[1])
        tile("Validation loss", f"{val.finite[-1][1]:.4f}", f"best {best:.4f} at step {step:,}")
    speed, trained = log.series.get("tokens_per_second"), log.series.get("valid_tokens_per_second")
    if speed and speed.finite:
        note = f"{_median(trained):,.0f} of them trained" if trained and trained.finite else ""
        tile("Tokens/s", f"{_median(speed):,.0f}", note)
    tokens = log.series.get("valid_tokens")
    if tokens and tokens.finite:
        tile("Trained tokens", f"{sum(v for _, v in tokens.finite):,.0f}")
    dropped = {s.name.removeprefix("dropped/"): s.values[-1] for s in dropped_series(log)}
    if any(dropped.values()):
        reasons = ", ".join(f"{count:,.0f} {reason}" for reason, count in dropped.items() if count)
        tile("Dropped", f"{sum(dropped.values()):,.0f}", reasons)
    broken = {series.name: len(series.broken_steps) for series in log.series.values() if series.broken_steps}
    if broken:
        names = ", ".join(f"{name} ({count})" for name, count in broken.items())
        tile("Values not finite", f"{sum(broken.values()):,}", names, bad=True)
    return tiles


def _median(series: Series) -> float:
    return statistics.median(value for _, value in series.finite)


def _table(log: MetricsLog) -> str:
    from nemo_rl.cli.charts import format_number

    rows = [
        "<tr>" + "".join(f"<th>{head}</th>" for head in ("metric", "points", "last", "min", "mean", "max")) + "</tr>"
    ]
    for name, series in sorted(log.series.items()):
        values = [v for _, v in series.finite]
        numbers = [series.values[-1], min(values), statistics.fmean(values), max(values)] if values else []
        cells = [f"{len(series.steps):,}", *(format_number(number) for number in numbers)]
        rows.append(f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
