"""Traces and metrics through OpenTelemetry: off by default, and free of cost while off."""
