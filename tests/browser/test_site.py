"""The built site in a headless Chromium: pages load cleanly, the theme's tools work, the figure does what it says."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from pathlib import Path

import pytest

from tests.built_site import built_site

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (see CONTRIBUTING.md)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]
# The background flags keep Chromium from calling home: then every request that is seen is the site's own.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FIGURE = "ideas/paged-kv/"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    """The site's address on this machine, served while the tests of this file run."""
    handler = functools.partial(Quiet, directory=built_site())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser, address):
    """`open_page(path, **context options) -> page` whose `.problems` collects errors, failed and foreign requests."""
    contexts = []

    def open_(path: str, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.problems = []
        page.on(
            "console", lambda m: page.problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: page.problems.append(f"exception: {error}"))
        page.on("requestfailed", lambda r: None if gave_up(r) else page.problems.append(f"failed: {r.url}"))
        page.on("response", lambda r: page.problems.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        page.on(
            "request", lambda r: page.problems.append(f"foreign: {r.url}") if not is_local(r.url, address) else None
        )
        page.goto(address + path)
        return page

    yield open_
    for context in contexts:
        context.close()


def gave_up(request) -> bool:
    """Leaving a page early cancels what it was still fetching; that is no fault of the page."""
    return request.failure == "net::ERR_ABORTED"


def is_local(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:" + address))


def paths() -> list[str]:
    root = built_site()
    return [
        page.parent.relative_to(root).as_posix().removeprefix(".") + "/" for page in sorted(root.rglob("index.html"))
    ]


# ---- every page ----


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (360, "dark")])
def test_every_page_loads_cleanly_and_fits_and_can_be_read(open_page, address, width, scheme):
    """No error, no failed or foreign request, no sideways scrolling, and text with enough contrast (WCAG's AA)."""
    poor_contrast = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
    page = open_page("", viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    expected = "default" if scheme == "light" else "slate"
    found = []
    for path in paths():
        page.goto(address + path.lstrip("/"))
        assert page.evaluate("document.body.dataset.mdColorScheme") == expected, path  # automatic: as the system says
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            found.append(f"{path} scrolls sideways: {widest(page)}")
        found += [f"{path} {problem}" for problem in page.problems + page.evaluate(poor_contrast)]
        page.problems.clear()
    assert not found, "\n".join(found)


def widest(page) -> str:
    return page.evaluate(
        """() => { let found = [0, ""];
        for (const e of document.querySelectorAll("article *")) { const r = e.getBoundingClientRect().right;
          if (r > found[0]) found = [r, e.outerHTML.slice(0, 120)]; }
        return found.join(" "); }"""
    )


# ---- the theme's tools ----


def test_search_finds_a_term(open_page):
    page = open_page("")
    page.keyboard.press("/")
    page.keyboard.type("left padding", delay=10)
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    assert "padding" in page.locator(".md-search-result__list").inner_text().lower()
    result.click()
    page.wait_for_load_state()
    assert "padding" in page.locator("article").inner_text().lower()
    assert not page.problems


def test_theme_can_be_switched_and_is_remembered(open_page):
    page = open_page("", color_scheme="light")
    seen = []
    for _ in range(3):
        seen.append(
            page.evaluate("[document.body.dataset.mdColorScheme, document.body.dataset.mdColorMedia].join(' ')")
        )
        page.locator("label[for^=__palette_]:visible").click()
    assert len(set(seen)) == 3, seen  # automatic, light, dark
    page.locator("label[for^=__palette_]:visible").click()
    page.locator("label[for^=__palette_]:visible").click()
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    page.reload()
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert not page.problems


def test_code_can_be_copied(open_page):
    page = open_page("start/", permissions=["clipboard-read", "clipboard-write"])
    block = page.locator("div.highlight:has(code):visible").first
    block.hover()
    block.locator("button[data-md-type=copy]").click()
    assert (
        page.evaluate("navigator.clipboard.readText()").strip()
        == block.locator("code").inner_text().strip()
        == "make setup"
    )


# ---- the interactive figure ----


@pytest.fixture
def figure(open_page):
    page = open_page(FIGURE)
    yield page
    assert not page.problems


def content(page) -> dict[str, str]:
    """Flat slot id -> what the picture shows in it, empty slots left out."""
    cells = page.locator("#pk-svg rect[data-slot]")
    pairs = cells.evaluate_all("all => all.map((cell) => [cell.dataset.slot, cell.dataset.content])")
    return {int(slot): text for slot, text in pairs if text}


def dense(page) -> dict[str, list[str]]:
    """Request -> its row of the gathered tensor."""
    rows = page.locator("#pk-svg g[data-row]").evaluate_all(
        "all => all.map((g) => [g.dataset.row, [...g.querySelectorAll('rect')].map((cell) => cell.dataset.content)])"
    )
    return dict(rows)


def table(page, name: str) -> list[int]:
    return [
        int(n) for n in re.findall(r"\d+", re.search(r"\[(.*?)\]", page.locator(f"#pk-table-{name}").inner_text())[1])
    ]


def free(page) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", page.locator("#pk-free-list").inner_text())]


def test_writing_token_by_token_and_in_one_go_put_the_same_tokens_in_the_same_slots(figure):
    for _ in range(5):
        figure.click("#pk-write-one")
    one_by_one = content(figure)
    assert figure.locator("#pk-calls").inner_text().endswith(" 5")
    assert table(figure, "A") == [5, 0]
    assert [one_by_one[slot] for slot in (20, 21, 22, 23, 0)] == ["A0", "A1", "A2", "A3", "A4"]
    assert "k_pool[0, 0] = k[i]" in figure.locator("#pk-index").inner_text()

    figure.click("#pk-reset")
    figure.click("#pk-write-all")
    assert content(figure) == one_by_one
    assert figure.locator("#pk-calls").inner_text().endswith(" 1")
    index = figure.locator("#pk-index").inner_text()
    assert "blocks         = [ 5  5  5  5  0]" in index and "slots          = [ 0  1  2  3  0]" in index


def test_gathering_token_by_token_and_in_one_go_give_the_same_padded_rows(figure):
    figure.click("#pk-write-all")
    figure.click("#pk-gather-all")
    expected = {
        "A": ["0", "A0", "A1", "A2", "A3", "A4"],
        "B": ["0", "0", "0", "B0", "B1", "B2"],
        "C": ["C0", "C1", "C2", "C3", "C4", "C5"],
    }
    assert dense(figure) == expected
    assert "[-3 -2 -1  0  1  2]" in figure.locator("#pk-index").inner_text()
    figure.click("#pk-gather-one")  # all there: starts again
    assert dense(figure)["A"] == ["0", "A0", "", "", "", ""]
    for _ in range(13):
        figure.click("#pk-gather-one")
    assert dense(figure) == expected
    assert "14 of 14" in figure.locator("#pk-status").inner_text()


def test_freed_blocks_keep_old_values_and_are_given_out_again(figure):
    figure.click("label:has(#pk-request-C)")
    figure.click("#pk-free")
    assert table(figure, "C") == [] and free(figure)[-2:] == [1, 4]
    assert content(figure)[4] == "C0 stale"
    figure.click("label:has(#pk-request-A)")
    figure.click("#pk-write-all")
    assert table(figure, "A") == [4, 1]
    assert content(figure)[16] == "A0"


def test_fragmenting_scatters_a_request_and_its_table_still_finds_it(figure):
    for size in ("2", "4", "8"):
        figure.select_option("#pk-block-size", size)
        figure.click("#pk-fragment")
        blocks = table(figure, "A")
        assert max(blocks) - min(blocks) >= len(blocks), "blocks of others lie between A's"
        assert "scattered" in figure.locator("#pk-table-A").inner_text()
        slots = [block * int(size) + slot for block in blocks for slot in range(int(size))]
        assert [content(figure)[slot] for slot in slots[:12]] == [f"A{pos}" for pos in range(12)]
        figure.click("#pk-gather-all")
        assert dense(figure)["A"] == [f"A{pos}" for pos in range(12)]


def test_allocating_more_than_there_is_says_so_and_changes_nothing(figure):
    for name in "ABC":
        figure.fill(f"#pk-length-{name}", "99")  # is cut to the longest that the figure knows
        figure.press(f"#pk-length-{name}", "Enter")
        assert figure.input_value(f"#pk-length-{name}") == "12"
        figure.click("#pk-allocate")
    assert "OutOfBlocks: request C needs 1 more, 0 free" in figure.locator("#pk-status").inner_text()
    assert len(table(figure, "A")) == len(table(figure, "B")) == 3 and len(table(figure, "C")) == 2


def test_the_figure_works_by_keyboard_and_says_what_it_did(figure):
    figure.focus("#pk-block-size")
    reached = []
    for _ in range(14):
        reached.append(figure.evaluate("document.activeElement.id"))
        figure.keyboard.press("Tab")
    for control in (
        "pk-request-A",
        "pk-length-A",
        "pk-length-C",
        "pk-allocate",
        "pk-write-one",
        "pk-gather-all",
        "pk-reset",
    ):
        assert control in reached, f"{control} cannot be reached with Tab: {reached}"
    figure.focus("#pk-write-one")
    figure.keyboard.press("Enter")
    figure.keyboard.press("Space")
    assert content(figure)[20] == "A0" and content(figure)[21] == "A1"
    assert figure.locator("#pk-status[role=status]").inner_text().startswith("Wrote token 1 of A")
    figure.focus("#pk-request-A")
    figure.keyboard.press("ArrowRight")
    assert figure.locator("#pk-free").inner_text() == "Free B"
    assert "A holds 2 tokens in block 5" in figure.locator("#pk-svg title").text_content()
    figure.click(".pk-data summary")
    assert figure.locator(".pk-data tbody tr").nth(5).inner_text().split("\t")[2] == "A0, A1, empty, empty"


def test_without_javascript_a_static_picture_stands_there(open_page):
    page = open_page(FIGURE, java_script_enabled=False)
    assert page.locator("#paged-kv-figure .pk-static svg").is_visible()
    assert page.locator("#pk-write-one").count() == 0
    assert not page.problems


def test_reduced_motion_is_respected(open_page):
    page = open_page(FIGURE, reduced_motion="reduce")
    duration = "getComputedStyle(document.querySelector('#pk-svg rect.pk-cell')).transitionDuration"
    assert float(page.evaluate(duration).removesuffix("s")) < 0.001
