"""Pictures of every page for the docs: `python -m tests.browser.screenshots [page …]`.

Each page at the width of a desk and of a phone, light and dark, as docs/images/dashboard/page-width-theme.webp.
With `--png FOLDER` as PNG and elsewhere, to look at them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import FLAGS, find_chromium
from tests.browser.demo import BUSIEST, Demo
from tests.browser.harness import Served, Tab, go, log_in

__all__ = ["PICTURES", "Picture"]

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "dashboard"
WIDTHS = {1280: 860, 390: 844}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
TALLEST = 1_400
"""A page that goes on for longer is cut off there."""
LARGEST = 3_000_000
"""Bytes of all pictures together: they are cloned with the source."""
PATIENCE = 300.0
EXAMPLE_POLICY = """{
  "fair": {"by": "account"},
  "limits": [
    {"kind": "concurrency", "max": 12, "by": "account"}
  ]
}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A page, and how to get to what it shows."""

    name: str
    path: Callable[[Demo], str] | str
    prepare: Callable[[Page], object] | None = None


def try_a_policy(page: Page) -> None:
    page.get_by_label("A · in force").fill("{}")
    page.get_by_label("B · to compare with").fill(EXAMPLE_POLICY)
    page.get_by_label("Declared").check()
    page.get_by_label("Slots of the fleet").fill("20")
    page.get_by_role("button", name="Try them").click()
    page.locator("#result .u-wrap").last.wait_for()


# A new page is a line here.
PICTURES = (
    Picture("overview", "/"),
    Picture("queues", "/queues"),
    Picture("queue", "/queues/webhooks"),
    Picture("keys", "/queues/webhooks/keys"),
    Picture("key", f"/queues/webhooks/key?key.account={BUSIEST}"),
    Picture("jobs", "/jobs?queue=webhooks"),
    Picture("job", lambda demo: f"/jobs/{demo.dead_job}"),
    Picture("waiting", lambda demo: f"/jobs/{demo.waiting_job}"),
    Picture("dead", "/dead"),
    Picture("confirm", f"/do/pause?queue=webhooks&key.account={BUSIEST}&back=/queues/webhooks"),
    Picture("schedules", "/schedules"),
    Picture("workers", "/workers"),
    Picture("audit", "/audit"),
    Picture("try", "/try?queue=webhooks", try_a_policy),
)


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.browser.screenshots")
    parser.add_argument("pages", nargs="*", metavar="page", help=f"of {', '.join(each.name for each in PICTURES)}")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="as PNG into this folder, not as WebP into the docs")
    given = parser.parse_args(arguments)
    chosen = [each for each in PICTURES if not given.pages or each.name in given.pages]
    folder, kind = (FOLDER, "webp") if given.png is None else (given.png, "png")
    chromium = find_chromium()
    assert chromium is not None, "there is no chromium here"
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place:
        demo = Demo(f"sqlite:///{place}/shop.db")
        with Served("", lambda _: demo.app) as served:
            served.run(demo.live(), PATIENCE)
            take_all(served, demo, chromium, chosen, folder, kind)
    size = sum(each.stat().st_size for each in folder.glob(f"*.{kind}"))
    print(f"{size / 1e6:.2f} MB in all")
    return int(folder == FOLDER and size > LARGEST)


def take_all(served: Served, demo: Demo, chromium: str, chosen: list[Picture], folder: Path, kind: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for width, height in WIDTHS.items():
            for theme in THEMES:
                context = browser.new_context(
                    base_url=served.address,
                    viewport={"width": width, "height": height},
                    color_scheme=theme,
                    reduced_motion="reduce",
                )
                tab = Tab(context.new_page())
                log_in(tab.page)
                for each in chosen:
                    take(tab.page, each, demo, folder / f"{each.name}-{width}-{theme}.{kind}")
                tab.assert_well()
                context.close()
        browser.close()


def take(page: Page, picture: Picture, demo: Demo, file: Path) -> None:
    path = picture.path if isinstance(picture.path, str) else picture.path(demo)
    go(page, f"{path}{'&' if '?' in path else '?'}every=0")
    page.wait_for_load_state()
    if picture.prepare is not None:
        picture.prepare(page)
    page.evaluate("() => document.fonts.ready.then(() => window.scrollTo(0, 0))")
    size = page.viewport_size
    assert size is not None
    tall = min(TALLEST, page.evaluate("() => document.documentElement.scrollHeight"))
    # Playwright knows no WebP, which is a third of the size; the browser does.
    options: dict[str, Any] = {"format": file.suffix.removeprefix("."), "captureBeyondViewport": True}
    options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": tall, "scale": 1}
    if file.suffix == ".webp":
        options["quality"] = 65
    session = page.context.new_cdp_session(page)
    file.write_bytes(b64decode(session.send("Page.captureScreenshot", options)["data"]))
    session.detach()
    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
