"""Is work flowing, who waits and why."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.page import Ask, Page

__all__ = ["PAGE"]


async def look(ask: Ask) -> dict[str, Any]:
    return {"policies": await ask.operations.show_policies()}


PAGE = Page(path="/", title="Overview", template="overview.html", look=look, nav="Overview", shortcut="o")
