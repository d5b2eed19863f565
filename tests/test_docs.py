"""The site: it builds strictly, links and commands exist, numbers are generated, nothing comes from another host."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown import Markdown
from mkdocs.config import load_config
from pymdownx.snippets import SnippetMissingError

from shared.docs import outputs
from shared.steps import ROOT, list_steps
from tests.built_site import built_site

DOCS = ROOT / "docs"
PAGES = outputs.pages()
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

# A benchmark's result, typed by hand. A quotation from elsewhere carries <!-- quoted --> on its line.
TYPED_RESULT = re.compile(
    r"\d\s*(?:tokens?/s|tok/s|GB/s|MB/s|GiB/s|ms|µs|us|ns)\b|\d\.\d+\s*(?:x|×|times)(?!\w)|\d\s*% (?:faster|slower)"
)


# Elements whose attributes a browser fetches by itself. `link` is fetched or not by its rel, see below.
FETCHING = {"script", "img", "source", "iframe", "video", "audio", "embed", "object", "track", "input", "image", "use"}
FETCHED = {"src", "srcset", "poster", "data", "href", "xlink:href"}


class Page(HTMLParser):
    """What a built page refers to: links, fetched files, ids, images, and its visible headings."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.links, self.fetched, self.styles, self.ids = path, [], [], [], []
        self.images, self.headings, self.lang, self.pictures = [], [], None, []
        self.open: list[str] = []
        self.unrendered: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = {key: value or "" for key, value in attrs}
        self.open += [] if tag in VOID else [tag]
        if tag == "html":
            self.lang = values.get("lang")
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and not {"canonical", "prev", "next", "alternate", "edit"} & set(
            values.get("rel", "").split()
        ):
            self.fetched.append(values["href"])
        if tag in FETCHING:
            self.fetched += [values[key] for key in FETCHED & set(values)]
        if "style" in values:
            self.styles.append(values["style"])
        if tag == "img":
            self.images.append(values)
        if tag == "svg" and values.get("role") == "img":
            self.pictures.append(values)
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.styles.append(data)
        elif not {"code", "pre", "script", "style"} & set(self.open):
            self.unrendered += re.findall(r".{0,20}(?:`|\*\*|--8<--|\]\(|\[\^).{0,20}", data)


@pytest.fixture(scope="session")
def site() -> dict[str, Page]:
    """The built site: each HTML file's path relative to the site, and what stands in it."""
    folder = built_site()
    return {path.relative_to(folder).as_posix(): Page(path) for path in sorted(folder.rglob("*.html"))}


@pytest.fixture(scope="module")
def config():
    return load_config(str(ROOT / "mkdocs.yml"))


def nav_files(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [name for entry in (nav.values() if isinstance(nav, dict) else nav) for name in nav_files(entry)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- the build ----


def test_every_page_is_built(site, config):
    for name in nav_files(config.nav):
        built = name.removesuffix(".md").removesuffix("index") + "/index.html"
        assert built.lstrip("/") in site, f"{name} is in the nav, but was not built"


def test_every_step_has_a_page_in_order(config):
    pages = [name for name in nav_files(config.nav) if name.startswith("steps/")]
    assert pages == [f"steps/{step.slug}.md" for step in list_steps(ROOT / "steps")]


def test_the_home_page_lists_every_step(site, config):
    linked = {link.strip("/") for link in site["index.html"].links}
    missing = [name for name in nav_files(config.nav) if name.startswith("steps/") and name[:-3] not in linked]
    assert not missing, f"docs/index.md does not link {missing}"


def test_a_missing_snippet_or_section_fails_the_build(config):
    markdown = Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    assert "SmolLM2" not in markdown.convert('--8<-- "LICENSE"')
    for missing in ("no/such/file.py", "docs/snippets/indexing.py:no_such_section"):
        with pytest.raises(SnippetMissingError):
            markdown.convert(f'--8<-- "{missing}"')


# ---- links, commands ----


def target_of(page: Page, link: str, root: Path) -> Path:
    """The file in the built site that a link without a host leads to."""
    path = unquote(urlsplit(link).path)
    base = root / path.lstrip("/") if path.startswith("/") else page.path.parent / path
    return (base / "index.html" if path.endswith("/") or base.is_dir() else base).resolve() if path else page.path


def test_internal_links_and_anchors_exist(site):
    root = site["index.html"].path.parent
    by_path = {page.path.resolve(): page for page in site.values()}
    broken = []
    for name, page in site.items():
        if name == "404.html":  # served for any address: its links start at the site's root
            continue
        for link in [*page.links, *page.fetched]:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target, anchor = target_of(page, link, root), unquote(urlsplit(link).fragment)
            if not target.is_file():
                broken.append(f"{name}: {link}")
            elif anchor and target.suffix == ".html" and anchor not in by_path[target].ids:
                broken.append(f"{name}: {link} (no such anchor)")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=relative)
def test_links_of_pages_outside_the_site_exist(page):
    for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        if not urlsplit(link).scheme:
            assert (ROOT / link).exists(), f"{page.name} links to {link}"


def test_make_targets_and_variables_named_on_pages_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) *\??:?=", makefile, re.MULTILINE))
    named = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"`(make [^`\n]+)`", text) + re.findall(r"^\s*(?:\$ )?(make [^\n#]+)", text, re.MULTILINE)
        for command in code:
            for word in command.split(" && ")[0].split()[1:]:
                if variable := re.fullmatch(r"([A-Z_]+)=.*", word):
                    assert variable[1] in variables, f"{relative(page)}: `{command}`: no variable {variable[1]}"
                elif re.fullmatch(r"[a-z][a-z-]*", word):
                    named += 1
                    assert word in targets, f"{relative(page)}: `{command}`: no target {word}"
                    break
    assert named > 10


# ---- nothing from elsewhere ----


def test_no_page_fetches_anything_from_another_host(site):
    for name, page in site.items():
        foreign = [link for link in page.fetched if re.match(r"(?:[a-z]+:)?//", link)]
        foreign += [url for style in page.styles for url in css_urls(style) if re.match(r"(?:[a-z]+:)?//", url)]
        assert not foreign, f"{name} fetches {foreign}"


def css_urls(text: str) -> list[str]:
    return re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)


def test_no_style_or_script_fetches_anything_from_another_host(site):
    root = site["index.html"].path.parent
    styles, scripts = list(root.rglob("*.css")), list((root / "assets").glob("*.js"))
    assert styles and scripts
    for path in styles:
        assert not [url for url in css_urls(path.read_text(encoding="utf-8")) if re.match(r"(?:https?:)?//", url)], path
    for path in scripts:  # our own: the theme's are watched in the browser
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text(encoding="utf-8")), path
    for path in root.rglob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:href|src)=[\"']https?:|@import|<script", text), path


# ---- what pages claim ----


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_benchmark_number_is_typed_by_hand(page):
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if "<!-- quoted -->" not in line and not re.search(r"bench:begin", line):
            typed = TYPED_RESULT.search(generated_part_removed(page, number, line))
            assert not typed, (
                f"{relative(page)}:{number}: {typed[0]!r} is typed: include it from docs/generated, or mark a quotation"
            )


def generated_part_removed(page: Path, number: int, line: str) -> str:
    """The line, or nothing where `make report` wrote it (the table in the README between its two markers)."""
    lines = page.read_text(encoding="utf-8").splitlines()
    before = [line for line in lines[: number - 1] if "<!-- bench:" in line]
    return "" if before and "bench:begin" in before[-1] else line


def test_the_rule_against_typed_numbers_bites():
    for typed in ("it reaches 361.3 tok/s", "12 ms per step", "about 0.88x of it", "1.4 × transformers", "20 % faster"):
        assert TYPED_RESULT.search(typed), typed
    for fine in (
        "16 slots",
        "49 % of the baseline",
        "2.5.7 or newer",
        "9/3 heads",
        "2 x as many",
        "step 03",
        "3 GB of disk",
    ):
        assert not TYPED_RESULT.search(fine), fine


COMMANDS = sorted({command for page in PAGES for command, _ in outputs.shown(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_output_on_pages_is_what_the_command_prints(command):
    printed = outputs.mask(outputs.run(command))
    for page in PAGES:
        for shown_command, output in outputs.shown(page.read_text(encoding="utf-8")):
            if shown_command == command:
                assert outputs.mask(output) == printed, f"{relative(page)}: run `python -m shared.docs.outputs`"


def test_output_comments_are_followed_by_their_block():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- output: ") == len(outputs.shown(text)), f"{relative(page)}: a ```text block must follow"
    assert COMMANDS, "no page shows what a command prints"


def test_masking_hides_measurements_and_nothing_else():
    assert outputs.mask("ok: 5 prompts, 12.5 ms, 1,234 tokens/s ") == "ok: 5 prompts, # ms, # tokens/s"
    assert outputs.mask("ok: 5 prompts") != outputs.mask("ok: 6 prompts")


# ---- readable by everybody ----


def test_pages_have_a_language_one_title_and_no_skipped_heading(site):
    for name, page in site.items():
        assert page.lang == "en", name
        assert page.headings.count("h1") == 1, f"{name}: {page.headings.count('h1')} first-level headings"
        levels = [int(tag[1]) for tag in page.headings]
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), f"{name}: {page.headings}"


def test_no_markdown_is_left_unrendered(site):
    for name, page in site.items():
        assert not page.unrendered, f"{name}: {page.unrendered}"


def test_ids_are_unique(site):
    for name, page in site.items():
        assert sorted(set(page.ids)) == sorted(page.ids), name


def test_images_have_alternative_text(site):
    for name, page in site.items():
        for image in page.images:
            assert len(image.get("alt", "")) > 20, f"{name}: {image.get('src')} needs a text that says what it shows"
        for picture in page.pictures:
            labels = picture.get("aria-labelledby", "").split()
            assert picture.get("aria-label") or (labels and set(labels) <= set(page.ids)), (
                f"{name}: a picture without a title"
            )


def test_plots_come_in_pairs_for_both_schemes(site):
    for name, page in site.items():
        sources = [image["src"] for image in page.images]
        light = sorted(source.replace("light", "dark") for source in sources if "#only-light" in source)
        assert light == sorted(source for source in sources if "#only-dark" in source), name


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two #rrggbb colours (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme, page_background", [("default", "#ffffff"), ("slate", "#1e2129")])
def test_colours_of_the_figure_have_enough_contrast(scheme, page_background):
    css = (DOCS / "assets/extra.css").read_text(encoding="utf-8")
    block = re.search(rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)}}', css, re.DOTALL)[1]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for name in "abc":
        assert contrast(colours[f"pk-{name}-text"], colours[f"pk-{name}"]) >= 4.5  # text on its cell
        assert contrast(colours[f"pk-{name}-line"], page_background) >= 3  # lines that carry meaning
    assert contrast(colours["pk-line"], page_background) >= 3
    assert contrast(colours["pk-touched"], page_background) >= 3
    assert contrast(colours["md-typeset-a-color"], page_background) >= 4.5
    assert contrast(colours["md-default-fg-color--light"], page_background) >= 4.5
