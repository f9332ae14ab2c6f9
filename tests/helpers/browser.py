"""A real Chromium without a window, with access to what it drew."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

from envbuild.core import locks

PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root has no sandbox, and a container no large /dev/shm.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")

# Text that can be seen, with its colour and what lies behind it. The ratio is WCAG 2's.
CONTRAST = """
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const light = c => c.slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] === 1) return c;
  }
  return [255, 255, 255, 1];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), e = walker.currentNode.parentElement;
  if (!text || !e.getClientRects().length || e.tagName === 'title') continue;
  const style = getComputedStyle(e), svg = e.ownerSVGElement !== null && e.ownerSVGElement !== undefined;
  const one = light(parse(svg ? style.fill : style.color)), two = light(behind(e));
  const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  found.push([Math.round(ratio * 100) / 100, text.slice(0, 40)]);
}
return found;
"""

# What can be seen in part alone, or by scrolling sideways, and words of a table's first column that break. A log and
# code scroll in a box of their own (pre); what is there for screen readers alone lies left of the page.
MISFITS = """
const width = document.documentElement.clientWidth, misfits = [];
const name = e => `${e.tagName.toLowerCase()}.${e.className} ${e.textContent.trim().slice(0, 40)}`;
if (document.documentElement.scrollWidth > width) misfits.push(`the page is ${document.documentElement.scrollWidth}`);
for (const e of document.querySelectorAll('body *')) {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  if (!box.width || box.right < 0 || e.ownerSVGElement || e.closest('pre')) continue;
  if (box.right > width + 1 || box.left < -1) misfits.push(`outside: ${name(e)}`);
  if (style.display !== 'inline' && e.scrollWidth > e.clientWidth + 1) misfits.push(`wider than its box: ${name(e)}`);
}
for (const row of document.querySelectorAll('tr')) {
  const texts = document.createTreeWalker(row.cells[0], NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.textContent.matchAll(/\\S+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    const lines = new Set([...range.getClientRects()].filter(r => r.width).map(r => Math.round(r.top)));
    if (lines.size > 1) misfits.push(`broken: ${word[0]}`);
  }
}
return [...new Set(misfits)];
"""


def chromium() -> tuple[str, str]:
    """This machine's browser and its driver; Debian's packages where there is none."""
    with locks.exclusive(Path("/tmp/envbuild-tests-chromium.lock")):
        if _binaries() is None:
            as_root = [] if os.getuid() == 0 else ["sudo", "-n"]
            words = ["apt-get", "install", "-qq", "-y", "--no-remove", "--no-install-recommends", *PACKAGES]
            subprocess.run([*as_root, "env", "DEBIAN_FRONTEND=noninteractive", *words], check=True, capture_output=True)
    binaries = _binaries()
    assert binaries, "the tests of the page need Chromium or Chrome, and chromedriver of the same version"
    return binaries


def _binaries() -> tuple[str, str] | None:
    driver = shutil.which("chromedriver")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    return (browser, driver) if browser and driver else None


@dataclass
class Browser:
    """A browser of one test; pages are files."""

    driver: webdriver.Chrome

    def show(self, page: Path, *, width: int, scheme: str) -> None:
        """Open a page at a width, in light or dark."""
        self.device(width, 900)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(page.as_uri())

    def device(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def contrasts(self) -> list[tuple[float, str]]:
        """How far each visible text is from what lies behind it."""
        return [(ratio, text) for ratio, text in self.ask(CONTRAST)]

    def misfits(self) -> list[str]:
        """What of the page is cut, overflows or breaks inside a word, with everything on it unfolded or not."""
        return list(self.ask(MISFITS))

    def unfold(self) -> None:
        self.ask("document.querySelectorAll('details').forEach(d => d.open = true)")

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What pages loaded since the last time; not what the browser's own first page does, however late that is."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        # By the document that asks: that page has pictures, too, at data: addresses.
        return [each["request"]["url"] for each in sent if each["documentURL"].startswith(("file:", "http"))]

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def screenshot(self, file: Path) -> bytes:
        """The page as a picture, as far down as the browser can: it refuses one that is too large."""
        width, height = self.ask("const e = document.documentElement; return [e.scrollWidth, e.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, LARGEST_PICTURE), "scale": 1}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        file.write_bytes(base64.b64decode(taken["data"]))
        return file.read_bytes()


# Pixels; what a texture may have on most machines.
LARGEST_PICTURE = 16000
TAB, ENTER = Keys.TAB, Keys.ENTER


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser while the block runs."""
    program, driver_program = chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_program))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
