"""Spans around code, the trace context on its way through Ray calls, and logged metrics that telemetry gets too.

While telemetry is off, every function here returns at once and imports nothing.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from nemo_rl.telemetry.setup import active_telemetry
from nemo_rl.telemetry.span_groups import RLSpanGroup

if TYPE_CHECKING:
    from collections.abc import Generator

    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_CARRIER_KEYWORD = "trace_carrier"
_NOTHING: AbstractContextManager[None] = nullcontext()


def managed_span(group: RLSpanGroup, name: str, tracer: Tracer | None = None) -> AbstractContextManager[None]:
    """A span over the body, under the innermost umbrella; the body's exception is recorded in it.

    Args:
        group: nothing is recorded unless it is among the enabled ones.
        name: of the span, such as `rl.sft_v2.policy_training`.
        tracer: records it in place of the process's own.
    """
    tracer = tracer or active_telemetry().tracer
    if tracer is None or group not in active_telemetry().groups:
        return _NOTHING
    return _leaf_span(tracer, name)


def umbrella_span(group: RLSpanGroup, name: str, tracer: Tracer | None = None) -> AbstractContextManager[Any]:
    """Like `managed_span`, and the parent of the spans inside the body, also of those in processes called from it."""
    tracer = tracer or active_telemetry().tracer
    if tracer is None or group not in active_telemetry().groups:
        return _NOTHING
    return tracer.start_as_current_span(name)


def trace_fn(group: RLSpanGroup, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a `managed_span` over each call."""
    return _spanning(managed_span, group, name)


def umbrella_trace_fn(group: RLSpanGroup, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: an `umbrella_span` over each call."""
    return _spanning(umbrella_span, group, name)


def current_trace_carrier() -> dict[str, str]:
    """The current trace context as W3C headers; empty when there is none."""
    if not active_telemetry().propagates:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def trace_context_kwargs() -> dict[str, dict[str, str]]:
    """Keywords to add to a call of a method that `accepts_trace_context`; empty when there is nothing to pass on."""
    carrier = current_trace_carrier()
    return {_CARRIER_KEYWORD: carrier} if carrier else {}


@contextmanager
def remote_trace_context(carrier: Mapping[str, str] | None) -> Generator[None, None, None]:
    """The body's spans lie under the caller's; without a carrier, or with telemetry off, nothing changes."""
    if not carrier or not active_telemetry().propagates:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


def accepts_trace_context(method: Callable[..., R]) -> Callable[..., R]:
    """Decorator: the method, which may be `async`, also takes what `trace_context_kwargs` gives, and runs under it."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        carrier = kwargs.pop(_CARRIER_KEYWORD, None)
        with remote_trace_context(carrier):
            return method(*args, **kwargs)

    @functools.wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        carrier = kwargs.pop(_CARRIER_KEYWORD, None)
        with remote_trace_context(carrier):
            return await cast(Any, method)(*args, **kwargs)

    under_caller: Any = call_async if inspect.iscoroutinefunction(method) else call
    # Ray checks a call against the signature of the innermost function, so the keyword has to stand in this one's.
    del under_caller.__wrapped__
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())
    keyword = inspect.Parameter(_CARRIER_KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=None)
    ends_in_kwargs = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - ends_in_kwargs, keyword)
    under_caller.__signature__ = signature.replace(parameters=parameters)
    return under_caller


@dataclass(frozen=True)
class TeedMetric:
    """A logged metric that telemetry gets too.

    Attributes:
        key: its name in the log.
        name: its name in telemetry, such as `rl.sft_v2.step.duration`.
        unit: UCUM code, such as `s` or `{token}/s`.
        description: one sentence for readers of dashboards.
    """

    key: str
    name: str
    unit: str
    description: str


_teed: dict[str, TeedMetric] = {}


def register_teed_metrics(metrics: Iterable[TeedMetric]) -> None:
    """Makes telemetry get these metrics from now on. Raises `ValueError` when a key means two metrics."""
    for metric in metrics:
        if _teed.setdefault(metric.key, metric) != metric:
            raise ValueError(f"the metric key {metric.key!r} is registered as {_teed[metric.key].name} already")


def teed_metrics() -> dict[str, TeedMetric]:
    """The registered metrics by key."""
    return dict(_teed)


def record_teed_metrics(values: Mapping[str, float]) -> None:
    """Sends the registered ones of these logged values to telemetry. Never raises: training goes on without it."""
    meter = active_telemetry().meter
    if meter is None:
        return
    for key in values.keys() & _teed.keys():
        metric = _teed[key]
        try:
            meter.create_gauge(metric.name, unit=metric.unit, description=metric.description).set(values[key])
        except Exception:  # an exporter may raise anything, and none of it may stop the training
            logger.warning("telemetry did not take the metric %s", metric.name, exc_info=True)


@contextmanager
def _leaf_span(tracer: Tracer, name: str) -> Generator[None, None, None]:
    from opentelemetry.trace import StatusCode

    span = tracer.start_span(name)
    try:
        yield
    except BaseException as error:
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, str(error))
        raise
    finally:
        span.end()


def _spanning(
    make_span: Callable[[RLSpanGroup, str], AbstractContextManager[Any]], group: RLSpanGroup, name: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_span(*args: P.args, **kwargs: P.kwargs) -> R:
            with make_span(group, name):
                return function(*args, **kwargs)

        return in_span

    return decorate
