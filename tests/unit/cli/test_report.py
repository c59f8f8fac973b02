"""The report page: complete, self-contained, with the right numbers. Not covered: its looks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from nemo_rl.cli.main import main

STEPS = 80


class _Page(HTMLParser):
    """Collects what the page loads, its text, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def _run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "a<b>&run"
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as out:
        for step in range(1, STEPS + 1):
            record = {
                "step": step,
                "time": 1e9 + step,
                "loss": 8 / step,
                "grad_norm": "NaN" if step == 7 else 1.0,
                "lr": 1e-4,
                "valid_tokens": 100,
                "valid_tokens_per_second": 5000 + step,
                "tokens_per_second": 7000 + step,
                "total_step_time": 1.5,
                "dropped/overlong": step // 2,
                "other</script>": step,
            }
            if step % 40 == 0:
                record["val_loss"] = 10 / step
            out.write(json.dumps(record) + "\n")
    return run


def test_the_page_stands_alone_and_says_the_right_numbers(tmp_path) -> None:
    run = _run_dir(tmp_path)
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text()
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"https?://|@import|url\(", html)
    text = " ".join(page.text)
    for expected in (
        "a<b>&run",
        "from 8.0000",
        "0.1000",  # the last loss, 8 / 80
        "best 0.1250 at step 80",
        "7,040",  # the median of 7001 .. 7080 is 7040.5, and halves round to even
        "5,040 of them trained",
        "8,000",  # trained tokens
        "40 overlong",
        "grad_norm (1)",
        "2:00 of training",
    ):
        assert expected in text, expected


def test_the_script_gets_every_curve(tmp_path) -> None:
    run = _run_dir(tmp_path)
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    html = out.read_text()
    data = re.search(r'<script type="application/json" id="points">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    charts = json.loads(data[1])
    assert len(charts) == len(re.findall("<figure ", html))
    loss = charts[0]["lines"][0]
    assert loss["label"] == "training"
    assert loss["points"][:2] == [[1, "8"], [2, "4"]]
    assert charts[0]["lines"][1]["points"] == [[40, "0.25"], [80, "0.125"]]
