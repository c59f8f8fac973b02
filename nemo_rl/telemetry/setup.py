"""Starts and ends telemetry in a process, and holds what is active there."""

from __future__ import annotations

import atexit
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_rl.telemetry.config import TelemetryConfig
from nemo_rl.telemetry.span_groups import RLSpanGroup
from nemo_rl.utils.errors import UserError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

_SCOPE = "nemo_rl"
# The driver's config, for the processes that inherit its environment.
_INHERITED = "ONEHOP_TELEMETRY"


@dataclass(frozen=True)
class Telemetry:
    """What a process exports through; all of it None and empty while telemetry is off."""

    tracer: Tracer | None = None
    meter: Meter | None = None
    groups: frozenset[RLSpanGroup] = frozenset()
    propagates: bool = False
    """True where a trace context goes on to other processes; so too where this process itself exports nothing."""
    _providers: tuple[Any, ...] = field(default=(), repr=False)

    def close(self) -> None:
        """Sends what is buffered and stops the exporters."""
        for provider in self._providers:
            provider.shutdown()


OFF = Telemetry()
_active = OFF


def active_telemetry() -> Telemetry:
    """What this process exports through."""
    return _active


def init_telemetry_driver(config: TelemetryConfig | None, algorithm: str) -> Telemetry:
    """Starts telemetry in the driver and puts the config into the environment, for the processes it starts later.

    Call it before Ray starts: workers inherit the environment. The service is named `service_name` and carries the
    attribute `rl.algorithm`.

    Raises:
        UserError: the exporter's package is not installed.
        ConfigError: a `NEMO_RL_OTEL_` variable of the wrong type.
    """
    config = TelemetryConfig.from_environment(config)
    os.environ[_INHERITED] = config.model_dump_json()
    return _activate(config, exports=True, attributes={"rl.algorithm": algorithm, "rl.role": "driver"})


def init_telemetry_worker(rank: int, world_size: int, worker_group: str, local_rank: int = 0) -> Telemetry:
    """Starts telemetry in a worker with the driver's config; `.tracer` of the result is None if it exports nothing.

    Args:
        rank: of this worker in its group of `world_size`; `export_strategy` decides whether it exports.
        worker_group: becomes the attribute `rl.worker_group`.
        local_rank: of this worker on its node.
    """
    config = TelemetryConfig.model_validate_json(os.environ.get(_INHERITED, "{}"))
    exports = config.exports_from(rank, world_size, local_rank)
    return _activate(config, exports=exports, attributes={"rl.worker_group": worker_group, "rl.rank": rank})


def shutdown_telemetry() -> None:
    """Sends what is buffered and turns telemetry off in this process; does nothing where it is off."""
    global _active
    _active, ending = OFF, _active
    atexit.unregister(shutdown_telemetry)
    ending.close()


def _activate(config: TelemetryConfig, *, exports: bool, attributes: dict[str, str | int]) -> Telemetry:
    global _active
    shutdown_telemetry()
    if not config.enabled:
        return _active
    if not exports:
        _active = Telemetry(propagates=config.traces_enabled)
        return _active

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased

    span_exporter, metric_exporter = _exporters(config.exporter)
    resource = Resource.create(
        {
            "service.name": config.service_name,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            **attributes,
        }
    )
    tracer = meter = None
    providers: list[Any] = []
    if config.traces_enabled:
        sampler = ParentBased(TraceIdRatioBased(config.export_sample_rate)) if config.sampler_enabled else ALWAYS_ON
        tracer_provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        tracer_provider.add_span_processor(BatchSpanProcessor(span_exporter))
        providers.append(tracer_provider)
        tracer = tracer_provider.get_tracer(_SCOPE)
    if config.metrics_enabled:
        reader = PeriodicExportingMetricReader(metric_exporter)
        meter_provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        providers.append(meter_provider)
        meter = meter_provider.get_meter(_SCOPE)
    _active = Telemetry(tracer, meter, config.groups(), propagates=tracer is not None, _providers=tuple(providers))
    atexit.register(shutdown_telemetry)
    return _active


def _exporters(name: str) -> tuple[SpanExporter, MetricExporter]:
    if name == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(), ConsoleMetricExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # pyrefly: ignore[missing-import]
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise UserError(
            "telemetry.exporter: otlp needs a package: `pip install opentelemetry-exporter-otlp-proto-http`, "
            "or set telemetry.exporter=console or telemetry.enabled=false"
        ) from error
    return OTLPSpanExporter(), OTLPMetricExporter()
