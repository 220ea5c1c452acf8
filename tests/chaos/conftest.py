from __future__ import annotations

from tests.worker.conftest import url

__all__ = ["url"]
