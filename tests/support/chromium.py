"""The Chromium of the system, without a window, driven by Playwright; and why there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dist_attn.errors import extra_hint

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["chromium", "why_no_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_MS = 120_000
# Each window has two pages for what is typed into its address bar, which load longer than ours. Of several lists of
# features the last one counts, so those that Playwright disables follow.
WITHOUT = (
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup,"
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,"
    "LensOverlay,MediaRouter,PaintHolding,ThirdPartyStoragePartitioning,AvoidCorsURLLoaderRestartOnRedirect,"
    "OptimizationHints,NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch"
)
FLAGS = [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--enable-precise-memory-info",
    f"--disable-features={WITHOUT}",
]  # fmt: skip


def _program() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def why_no_chromium() -> str | None:
    """What is missing, or None."""
    if find_spec("playwright") is None:
        return f"needs Playwright: {extra_hint('browser')}"
    if _program() is None:
        return f"needs a Chromium: none of {', '.join(NAMES)} is on the PATH"
    return None


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser that ends with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_program(), args=FLAGS, timeout=START_MS)
        try:
            yield browser
        finally:
            browser.close()
