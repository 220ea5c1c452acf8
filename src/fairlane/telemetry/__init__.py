"""Telemetry: events, metrics and traces. None of it can stop a job, and what nobody asks for costs nothing."""
