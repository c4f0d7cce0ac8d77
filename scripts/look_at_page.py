"""Open the page of a run in a headless browser: what it shows, what it would fetch, and a picture of it.

    python -m scripts.look_at_page outputs/demo/sft/report.html --picture docs/images/report.png

Any Chromium will do (`chromium`, `chromium-headless-shell`, `google-chrome`), or the one that HF_ZERO_BROWSER names.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


BROWSER = "HF_ZERO_BROWSER"
_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
# No name is looked up, so that a page which needs another file looks broken here as well.
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND")
_LIMIT_S = 300
# Runs in a copy of the page, behind it. Boxes are compared to a pixel: browsers round.
_MEASURE = """<script>
const box = (element) => element.getBoundingClientRect();
const inside = (one, other) => one.left >= other.left - 1 && one.right <= other.right + 1
    && one.top >= other.top - 1 && one.bottom <= other.bottom + 1;
const drawings = [...document.querySelectorAll("svg")];
const seen = {
    title: document.title,
    headings: [...document.querySelectorAll("h2")].filter((each) => box(each).height).map((each) => each.innerText),
    drawings: Object.fromEntries(drawings.map((each) => [each.id, [box(each).width, box(each).height]])),
    cut: drawings.flatMap((svg) => [...svg.querySelectorAll("text")].filter((each) => !inside(box(each), box(svg)))
        .map((each) => each.textContent)),
    covered: drawings.flatMap((svg) => {
        const texts = [...svg.querySelectorAll("text")].map((each) => [box(each), each.textContent]);
        return texts.flatMap(([one, name], place) => texts.slice(place + 1).filter(([other]) =>
            one.left + 1 < other.right && other.left + 1 < one.right && one.top + 2 < other.bottom
            && other.top + 2 < one.bottom).map(([, other]) => `${name} | ${other}`));
    }),
    fetched: performance.getEntriesByType("resource").map((each) => each.name),
    width: innerWidth, needed: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    facts: JSON.parse(document.getElementById("facts").textContent).stage,
};
const target = document.createElement("pre");
target.id = "seen";
target.textContent = JSON.stringify(seen);
document.body.append(target);
</script>"""


def find_browser() -> str | None:
    """The command of a browser that runs without a screen, or None."""
    return os.environ.get(BROWSER) or next(filter(None, map(shutil.which, _NAMES)), None)


def _run(browser: str, page: Path, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *_FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{browser} ended with exit status {done.returncode}: {done.stderr}")
    return done.stdout


def look(browser: str, page: Path, width: int = 1000) -> dict[str, Any]:
    """What a window of so many pixels shows: sizes of drawings, `cut` and `covered` texts in them, files `fetched`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / page.name
        copy.write_text(page.read_text().replace("</body>", f"{_MEASURE}</body>"))
        shown = _run(browser, copy, f"--window-size={width},800", "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown, re.DOTALL)
    assert found is not None, shown[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u00a0").replace("&amp;", "&")
    return json.loads(text)


def picture(browser: str, page: Path, target: Path, width: int, height: int) -> None:
    """The upper part of the page as PNG."""
    _run(browser, page, f"--window-size={width},{height}", f"--screenshot={target.resolve()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--width", type=int, default=1000, help="of the window, in pixels (default: 1000)")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="write what the window shows")
    parser.add_argument("--height", type=int, help="of the picture (default: the whole page)")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(f"no browser: install chromium, or name one in {BROWSER}", file=sys.stderr)
        return 2
    seen = look(browser, options.page, options.width)
    print(json.dumps(seen, indent=2))
    if options.picture:
        picture(browser, options.page, options.picture, options.width, options.height or seen["height"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
