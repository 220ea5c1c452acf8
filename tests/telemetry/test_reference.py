"""The tables of docs/reference/telemetry.md are those of the code: `python -m tests.telemetry.test_reference`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fairlane.events import EVENTS
from fairlane.telemetry import metrics, telemetry
from fairlane.telemetry.metrics import CATALOGUE, JOBS, REASONS, SECONDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "telemetry.md"


def events_table() -> str:
    lines = ["| event | fields | when |", "|---|---|---|"]
    for kind in EVENTS:
        fields = ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind))
        lines.append(f"| `{kind.__name__}` | {fields} | {' '.join((kind.__doc__ or '').split())} |")
    return "\n".join(lines)


def metrics_table() -> str:
    lines = ["| metric | kind | labels | OpenTelemetry | meaning |", "|---|---|---|---|---|"]
    for metric in CATALOGUE.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        whose = "The fleet. " if metric.scope == "fleet" else ""
        name = f"`{metric.dotted}`, {metric.unit}"
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {name} | {whose}{metric.help} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    for name, table in (("events", events_table()), ("metrics", metrics_table())):
        text = re.sub(
            rf"<!-- {name} -->\n.*?<!-- end -->",
            lambda _, name=name, table=table: f"<!-- {name} -->\n\n{table}\n\n<!-- end -->",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
    return text


def test_the_reference_has_every_event_and_every_metric() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "telemetry has changed; run: python -m tests.telemetry.test_reference"


def test_the_reference_names_every_reason_and_every_number() -> None:
    text = " ".join(PAGE.read_text().split())
    for reason in (*REASONS, *metrics.LOST):
        assert f"`{reason}`" in text
    for number in (telemetry.WAITING_AT_MOST, metrics.SERIES_AT_MOST):
        assert f"{number:,}" in text
    assert f"at most {telemetry.HANDLED_WITHIN:g} seconds an event" in text
    assert f"up to {telemetry.FLUSHED_WITHIN:g} seconds" in text
    assert f"Boundaries of seconds: {', '.join(f'{each:g}' for each in SECONDS)}. Of jobs: " in text
    assert f"Of jobs: {', '.join(f'{each:g}' for each in JOBS)}." in text
    how_to = " ".join((PAGE.parents[1] / "how-to" / "watch-with-prometheus-and-opentelemetry.md").read_text().split())
    assert f"at most every {metrics.LOOKED_UP_EVERY:g} seconds" in how_to


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
