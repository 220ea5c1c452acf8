"""The registry in the text format of Prometheus.

Written here rather than with `prometheus-client`: the format is a page long, our registry belongs to a worker and not
to a whole process, and so the endpoint needs no extra package. The client's own parser reads it in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import isfinite

from fairlane.telemetry.catalogue import Metric
from fairlane.telemetry.metrics import Cell, Labels, Sample

__all__ = ["CONTENT_TYPE", "as_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def as_text(samples: Iterable[Sample]) -> str:
    """What a scrape is told."""
    return "".join(f"{line}\n" for metric, values in samples for line in _lines(metric, values))


def _lines(metric: Metric, values: Iterable[tuple[Labels, float | Cell]]) -> Iterator[str]:
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in values:
        pairs = list(zip(metric.labels, labels, strict=True))
        if isinstance(value, Cell):
            counts = list(accumulate(value.counts))
            for boundary, count in zip([*map(_number, metric.boundaries), "+Inf"], counts, strict=True):
                yield f"{metric.name}_bucket{_shown([*pairs, ('le', boundary)])} {count}"
            yield f"{metric.name}_sum{_shown(pairs)} {_number(value.total)}"
            yield f"{metric.name}_count{_shown(pairs)} {counts[-1]}"
        else:
            yield f"{metric.name}{_shown(pairs)} {_number(value)}"


def _shown(pairs: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
