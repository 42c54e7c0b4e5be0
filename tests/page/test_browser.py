"""The page in a real browser, where there is one: it opens without a word of complaint, and is never wider than it.

`$CHROMIUM` names one; else Chromium or Chrome is looked for. `.ci/run` installs Debian's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.page import Beside, to_html
from autopar.plan.value import Candidate
from tests.page.pages import read
from tests.simulate.plans import drawn

KNOWN = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, KNOWN)), None)
WIDTHS = (400, 1400)
# What a page of its own says of itself: its width, and what leaves it at the right without a frame that scrolls.
MEASURE = """
addEventListener("load", () => {
  const wide = document.documentElement.clientWidth;
  const out = [...document.querySelectorAll("main *")].filter(one => !one.closest(".wide, .scroll, svg, thead")
    && one.getBoundingClientRect().right > wide + 1).map(one => one.tagName + "." + one.className);
  document.title = [innerWidth, document.documentElement.scrollWidth, out.join(" ")].join("|");
});"""
FRAME = """<!doctype html><title></title><body style="margin:0">
<iframe id="page" style="border:0;width:{width}px;height:900px" src="page.html"></iframe><script>
page.onload = () => {{ document.title = page.contentDocument.title; }};</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium, or name one in $CHROMIUM")


def opened(path: Path, folder: Path, *options: str) -> tuple[str, str]:
    """(the page as the browser then has it, what it said on its console)."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run",
         "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0", f"--user-data-dir={folder}/profile",
         *options, path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)


def of(name: str, sizes: tuple[int, ...], prefetch: int | None) -> str:
    plan = replace(drawn(name, sizes, 1)[0], prefetch=prefetch, memory_limit=2.0**31, notes=("a note " * 40,))
    long = "re-solved with overlap prices and a name that is very long indeed, round 1"
    plan = replace(plan, candidates=(Candidate(long, 1e-3, 2e-3, 10**9, 2, "x" * 200),), search={"candidate": long})
    rows = [Beside("data=8,tensor=8", 1e-3, 1e9, "a note"), Beside("data=64", None, None, "does not fit")]
    return to_html(plan, model=f"a/long/{'path/' * 20}model.py:build", meshes=rows, curve=[(1e9, 2e-3), (2e9, 1e-3)])


@pytest.mark.parametrize(("name", "sizes", "prefetch"), [("block", (2, 2), 1), ("mlp", (2,), None)])
def test_it_fits_any_width_and_says_nothing(tmp_path, name, sizes, prefetch):
    page = of(name, sizes, prefetch)
    (tmp_path / "plain.html").write_text(page)
    told, said = opened(tmp_path / "plain.html", tmp_path, "--dump-dom")
    assert said == ""
    assert len(read(told).all("rect")) == len(read(page).all("rect")), "the browser reads it as it is meant"
    (tmp_path / "page.html").write_text(page + f"<script>{MEASURE}</script>")
    for width in WIDTHS:
        (tmp_path / "frame.html").write_text(FRAME.format(width=width))
        told, said = opened(tmp_path / "frame.html", tmp_path, "--dump-dom", "--window-size=1600,1000")
        (title,) = re.findall("<title>(.*?)</title>", told)
        inner, scroll, out = title.split("|")
        assert said == "" and int(inner) == width and int(scroll) <= width and out == ""


def test_a_complaint_would_be_heard_and_a_wide_page_seen(tmp_path):
    wide = '<div style="width:700px">wide</div><img src="none.png">'
    script = f"<script>{MEASURE}\nmissing();</script>"
    broken = f'<!doctype html><title></title><body style="margin:0"><main>{wide}</main>{script}'
    (tmp_path / "page.html").write_text(broken)
    (tmp_path / "frame.html").write_text(FRAME.format(width=400))
    told, said = opened(tmp_path / "frame.html", tmp_path, "--dump-dom")
    assert "missing is not defined" in said
    (title,) = re.findall("<title>(.*?)</title>", told)
    assert title == "400|700|DIV."


def test_it_can_be_seen(tmp_path):
    (tmp_path / "page.html").write_text(of("mlp", (2,), 1))
    picture = tmp_path / "page.png"
    opened(tmp_path / "page.html", tmp_path, f"--screenshot={picture}", "--window-size=1000,800")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
