"""Spans, propagation and metrics against OpenTelemetry's in-memory exporters. Not covered: an OTLP collector."""

import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nemo_rl.telemetry import instrumentation, setup
from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.telemetry.instrumentation import (
    TeedMetric,
    accepts_trace_context,
    current_trace_carrier,
    managed_span,
    record_teed_metrics,
    register_teed_metrics,
    remote_trace_context,
    teed_metrics,
    trace_context_kwargs,
    trace_fn,
    umbrella_span,
    umbrella_trace_fn,
)
from nemo_rl.telemetry.setup import (
    OFF,
    active_telemetry,
    init_telemetry_driver,
    init_telemetry_worker,
    shutdown_telemetry,
)
from nemo_rl.telemetry.span_groups import RLSpanGroup, enabled_groups
from nemo_rl.utils.config import validate_config
from nemo_rl.utils.errors import ConfigError, UserError

STEP, UPDATE = RLSpanGroup.U_STEP, RLSpanGroup.POLICY_UPDATE


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Telemetry off before and after, and no variable or registered metric left behind."""
    for name in [name for name in os.environ if name.startswith(("NEMO_RL_OTEL_", "ONEHOP_TELEMETRY"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(instrumentation, "_teed", {})
    yield
    shutdown_telemetry()
    os.environ.pop("ONEHOP_TELEMETRY", None)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(setup, "_exporters", lambda _: (exporter, None))
    return exporter


def finished(exporter: InMemorySpanExporter) -> dict[str, Any]:
    for provider in active_telemetry()._providers:
        provider.force_flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def start(**config: Any) -> setup.Telemetry:
    return init_telemetry_driver(TelemetryConfig(enabled=True, **{"metrics_enabled": False, **config}), "sft_v2")


def test_off_is_free_and_silent():
    assert init_telemetry_driver(None, "sft_v2") is OFF
    assert init_telemetry_worker(0, 1, "group") is OFF
    assert managed_span(STEP, "a") is umbrella_span(UPDATE, "b")
    with managed_span(STEP, "a"), umbrella_span(STEP, "b"), remote_trace_context({"traceparent": "00-x"}):
        assert current_trace_carrier() == {} and trace_context_kwargs() == {}
    assert trace_fn(STEP, "x")(lambda a, b=2: a + b)(1) == 3
    assert accepts_trace_context(lambda a: a)(1, trace_carrier={"traceparent": "00-x"}) == 1
    record_teed_metrics({"loss": 1.0})


def test_off_imports_no_opentelemetry():
    code = (
        "import sys; from nemo_rl.telemetry.setup import init_telemetry_driver;"
        "from nemo_rl.telemetry.instrumentation import managed_span;"
        "from nemo_rl.telemetry.span_groups import RLSpanGroup;"
        "init_telemetry_driver(None, 'a'); managed_span(RLSpanGroup.U_JOB, 'x').__enter__();"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_umbrellas_are_the_parents_of_what_is_inside(spans: InMemorySpanExporter):
    start()
    with umbrella_span(RLSpanGroup.U_JOB, "job"), umbrella_span(STEP, "step"), managed_span(UPDATE, "outer"):
        with managed_span(UPDATE, "inner"), managed_span(RLSpanGroup.CHECKPOINT, "not enabled"):
            pass
        umbrella_trace_fn(STEP, "decorated")(lambda: trace_fn(UPDATE, "leaf")(lambda: None)())()
    found = finished(spans)
    parents = {
        name: next((n for n, s in found.items() if span.parent and s.context.span_id == span.parent.span_id), None)
        for name, span in found.items()
    }
    assert parents == {
        "job": None,
        "step": "job",
        "outer": "step",
        "inner": "step",
        "decorated": "step",
        "leaf": "decorated",
    }
    assert found["job"].resource.attributes["service.name"] == "nemo-rl"
    assert found["job"].resource.attributes["rl.algorithm"] == "sft_v2"


@pytest.mark.parametrize("make_span", [managed_span, umbrella_span])
def test_an_exception_is_recorded_and_goes_on(spans: InMemorySpanExporter, make_span: Any):
    start()
    with pytest.raises(RuntimeError, match="broken"), make_span(STEP, "a"):
        raise RuntimeError("broken")
    span = finished(spans)["a"]
    assert not span.status.is_ok and span.events[0].name == "exception"


def test_a_call_runs_under_the_trace_of_its_caller(spans: InMemorySpanExporter):
    start()

    class Worker:
        @accepts_trace_context
        def work(self, a: int, *, b: int = 2) -> int:
            with managed_span(UPDATE, "work"):
                return a + b

    with umbrella_span(STEP, "call"):
        kwargs = trace_context_kwargs()
    assert Worker().work(1, b=3, **kwargs) == 4
    found = finished(spans)
    assert found["work"].parent.span_id == found["call"].context.span_id
    assert found["work"].context.trace_id == found["call"].context.trace_id
    assert current_trace_carrier() == {}
    assert str(inspect.signature(Worker.work)) == "(self, a: int, *, b: int = 2, trace_carrier=None) -> int"


def test_the_signature_keeps_var_keywords_last():
    @accepts_trace_context
    def call(*args: int, **kwargs: int) -> None: ...

    assert list(inspect.signature(call).parameters) == ["args", "trace_carrier", "kwargs"]


def test_a_worker_that_exports_nothing_passes_the_trace_on(spans: InMemorySpanExporter):
    start()
    with umbrella_span(STEP, "call"):
        carrier = current_trace_carrier()
    worker = init_telemetry_worker(0, 2, "policy")
    assert worker.tracer is None
    with remote_trace_context(carrier):
        assert current_trace_carrier() == carrier
    assert init_telemetry_worker(1, 2, "policy").tracer is not None


def test_a_worker_inherits_the_config_and_the_console_shows_the_spans():
    code = (
        "from nemo_rl.telemetry.setup import *; from nemo_rl.telemetry.instrumentation import *;"
        "init_telemetry_worker(3, 4, 'policy');\n"
        "with managed_span(RLSpanGroup.POLICY_UPDATE, 'in the worker'): pass"
    )
    start(exporter="console", service_name="mine")
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    span = json.loads(output)
    assert span["name"] == "in the worker"
    attributes = span["resource"]["attributes"]
    assert (attributes["service.name"], attributes["rl.worker_group"], attributes["rl.rank"]) == ("mine", "policy", 3)


def test_registered_metrics_are_recorded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    reader = InMemoryMetricReader()

    class Discard(MetricExporter):
        def export(self, *_: Any, **__: Any) -> Any: ...
        def shutdown(self, *_: Any, **__: Any) -> None: ...
        def force_flush(self, *_: Any, **__: Any) -> bool:
            return True

    monkeypatch.setattr(setup, "_exporters", lambda _: (None, Discard()))
    monkeypatch.setattr("opentelemetry.sdk.metrics.export.PeriodicExportingMetricReader", lambda _: reader)
    start(metrics_enabled=True, traces_enabled=False)
    metric = TeedMetric("total_step_time", "rl.sft_v2.step.duration", unit="s", description="Duration of a step.")
    register_teed_metrics((metric,))
    register_teed_metrics((metric,))
    with pytest.raises(ValueError, match="'total_step_time' is registered as rl"):
        register_teed_metrics((TeedMetric("total_step_time", "other", "s", ""),))
    assert teed_metrics() == {"total_step_time": metric}
    with caplog.at_level(logging.WARNING):
        for value in (1.5, 2.5):
            record_teed_metrics({"total_step_time": value, "loss": 0.1})
    data = reader.get_metrics_data()
    assert data is not None
    (found,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (found.name, found.unit, found.data.data_points[0].value) == ("rl.sft_v2.step.duration", "s", 2.5)
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "world_size", "ranks"),
    [
        ({}, 4, [3]),
        ({"export_rank": 0}, 4, [0]),
        ({"export_strategy": "all_ranks"}, 3, [0, 1, 2]),
        ({"export_strategy": "first_rank_per_node"}, 4, [0, 2]),
        ({"export_strategy": "sampled", "export_sample_rate": 0.5}, 4, [1, 3]),
        ({"export_strategy": "sampled"}, 2, [0, 1]),
    ],
)
def test_which_ranks_export(config: dict[str, Any], world_size: int, ranks: list[int]):
    """The ranks sit two to a node."""
    telemetry = TelemetryConfig(**config)
    assert [rank for rank in range(world_size) if telemetry.exports_from(rank, world_size, rank % 2)] == ranks


def test_the_environment_wins_and_its_faults_are_named():
    base = TelemetryConfig(service_name="yaml", export_rank=2)
    environment = {"NEMO_RL_OTEL_ENABLED": "true", "NEMO_RL_OTEL_EXPORT_RANK": "1"}
    config = TelemetryConfig.from_environment(base, environment)
    assert (config.enabled, config.export_rank, config.service_name) == (True, 1, "yaml")
    with pytest.raises(ConfigError, match="NEMO_RL_OTEL_EXPORT_RANK: expected a whole number, got 'last'"):
        TelemetryConfig.from_environment(base, {"NEMO_RL_OTEL_EXPORT_RANK": "last"})


def test_span_groups():
    assert enabled_groups("default") < enabled_groups("all") == frozenset(RLSpanGroup)
    assert enabled_groups("u_step, checkpoint") == {RLSpanGroup.U_STEP, RLSpanGroup.CHECKPOINT}
    with pytest.raises(ConfigError, match="span_groups: expected default, all or names out of u_job"):
        validate_config(TelemetryConfig, {"span_groups": "steps"})


def test_the_missing_exporter_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    with pytest.raises(UserError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        start(exporter="otlp")
    assert active_telemetry() is OFF
