"""Looks at each page of the site in a headless browser: ``make browser``, after ``make docs``.

Every page at the width of a desktop and of a phone: nothing is wider than the window but what
scrolls, pictures are there, pages end, links lead somewhere; and the search finds names. Pictures
of some pages are left in ``build/browser``, to be looked at.
"""

import functools
import http.server
import os
import pathlib
import shutil
import sys
import threading
import urllib.parse
from typing import Any

from playwright.sync_api import Page, sync_playwright

SITE = pathlib.Path(__file__).parents[1] / "build" / "docs"
SHOTS = SITE.parent / "browser"
BROWSERS = "chromium", "google-chrome", "chromium-browser", "chrome"
WIDTHS, HEIGHT, MAX_HEIGHT = {"desktop": 1280, "phone": 390}, 900, 15_000
OWN_LENGTH = "genindex.html", "search.html", "CHANGELOG.html"
SHOWN = (
    "index.html",
    "notebooks/layouts.html",
    "tests/benchmarks/served.html",
    "api/jaxkv.Engine.html",
)
SEARCHED = {"Engine": "api/jaxkv.Engine.html", "preemption": "", "offload": "", "fp8": ""}
LOOK = """() => {
  const root = document.documentElement, width = root.clientWidth;
  const scrolls = e => ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX);
  const isInside = e => {
    for (let at = e.parentElement; at; at = at.parentElement) if (scrolls(at)) return true;
    return false;
  };
  const wide = [...document.querySelectorAll('article *')].filter(
    e => e.getBoundingClientRect().right > width + 1 && e.getClientRects().length && !isInside(e));
  return {
    height: root.scrollHeight,
    overflow: root.scrollWidth - width,
    wide: wide.slice(0, 2).map(e => e.outerHTML.slice(0, 90)),
    lost: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    links: [...document.links].map(link => link.href),
    ids: [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name),
  };
}"""


def find_browser() -> str:
    """Returns the path of a Chromium or Chrome."""
    named = os.environ.get("BROWSER_PATH")
    if found := named or next(filter(None, map(shutil.which, BROWSERS)), None):
        return found
    sys.exit("no browser: install chromium (Debian: apt-get install chromium), or set BROWSER_PATH")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def serve() -> str:
    """Serves the site to this machine, and returns its address."""
    handler = functools.partial(Handler, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def look(page: Page, site: str, name: str) -> tuple[list[str], dict[str, Any]]:
    """Returns the faults of a page at each width, and its links and anchors."""
    faults, seen = [], dict[str, Any]()
    page.goto(site + name)
    for device, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": HEIGHT})
        seen, where = page.evaluate(LOOK), f"{name}, {device}:"
        if seen["overflow"] > 0 or seen["wide"]:
            faults.append(f"{where} wider than the window: {seen['wide']}")
        if seen["height"] > MAX_HEIGHT and name not in OWN_LENGTH:
            faults.append(f"{where} {seen['height']:,} pixels high")
        faults += [f"{where} no picture {url}" for url in seen["lost"]]
    return faults, seen


def dead_links(site: str, pages: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the links of all pages to files or anchors that are not there."""
    faults = set()
    for name, seen in pages.items():
        for link in seen["links"]:
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            if not path.startswith(site):
                continue
            target = path.removeprefix(site) or "index.html"
            ids = pages[target]["ids"] if target in pages else [anchor]
            if not (SITE / target).exists() or (anchor and anchor not in ids):
                faults.add(f"{name}: {target}#{anchor} is not there")
    return sorted(faults)


def search(page: Page, site: str) -> list[str]:
    """Returns what the search does not find."""
    faults = []
    for words, wanted in SEARCHED.items():
        page.goto(f"{site}search.html?q={words}")
        page.wait_for_selector("ul.search li a", timeout=20_000)
        page.wait_for_timeout(500)
        found = page.eval_on_selector_all("ul.search li a", "all => all.map(a => a.href)")
        if not any(wanted in link for link in found):
            faults.append(f"search for {words}: {found[:3]}")
    return faults


def shoot(page: Page, site: str, scheme: str) -> list[str]:
    """Leaves pictures of some pages; returns those whose figures stay white in the dark."""
    faults = []
    page.emulate_media(color_scheme=scheme)
    for name in SHOWN:
        page.goto(site + name)
        for device, width in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": 2 * HEIGHT})
            page.screenshot(path=SHOTS / f"{name.replace('/', '.')}.{device}.{scheme}.png")
        how = "all => all.map(i => getComputedStyle(i).filter)"
        filters = page.eval_on_selector_all("article img", how)
        if scheme == "dark" and "none" in filters:
            faults.append(f"{name}: a figure that stays white in the dark")
    return faults


def main() -> int:
    """Returns 1, and prints all faults, if there are any."""
    SHOTS.mkdir(exist_ok=True)
    faults, pages, site = list[str](), dict[str, dict[str, Any]](), serve()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox"]
        )  # as root, and only files of ours
        page = browser.new_page()
        page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
        for path in sorted(SITE.rglob("*.html")):
            name = path.relative_to(SITE).as_posix()
            found, pages[name] = look(page, site, name)
            faults += found
        faults += search(page, site)
        for scheme in ("light", "dark"):
            faults += shoot(page, site, scheme)
        browser.close()
    faults += dead_links(site, pages)
    print(*faults, f"{len(pages)} pages looked at, {len(faults)} faults", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
