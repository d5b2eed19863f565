"""The generators behind the pages: code cut out by name, and pictures that can be read in both colour schemes."""

from xml.etree import ElementTree

import pytest

from shared.docs import code, padding, pictures
from shared.errors import UserError
from shared.steps import Step

SVG = "{http://www.w3.org/2000/svg}"
PAGE_BACKGROUNDS = {"light": "#ffffff", "dark": "#1e2129"}
RENDERED = [pytest.param(draw(), id=draw.__name__) for draw in pictures.PICTURES]


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import math\n\n\nclass A:\n    @property\n    def f(self):\n        return 1\n\n\ndef g():\n    return 2\n"
    )
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("g", "def g():\n    return 2"),
        ("A.f", "@property\ndef f(self):\n    return 1"),
        ("A", "class A:\n    @property\n    def f(self):\n        return 1"),
    ],
)
def test_cut_by_name(module, name, expected):
    assert code.cut(module, name) == expected


@pytest.mark.parametrize("name", ["h", "A.g", "g.f", "math"])
def test_a_name_that_is_gone_fails(module, name):
    with pytest.raises(UserError, match="does not define"):
        code.cut(module, name)


def test_only_what_pages_ask_for_is_cut(tmp_path, module):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text('--8<-- "docs/generated/code/01_x/model/A.f.md"\n')
    step = Step(tmp_path.rename(tmp_path.with_name("01_x")))
    docs = step.path / "docs"
    assert code.render(docs, [step]).keys() == {"code/01_x/model/A.f.md"}
    (docs / "page.md").write_text('--8<-- "docs/generated/code/02_y/model/A.f.md"\n')
    with pytest.raises(UserError, match="no step"):
        code.render(docs, [step])


@pytest.mark.parametrize("picture", RENDERED)
def test_picture_can_be_inlined_and_read_out(picture):
    text = picture.svg()
    root = ElementTree.fromstring(text)
    assert "\n\n" not in text  # a blank line would end the HTML block on the page
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title.text and description.text and root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]


@pytest.mark.parametrize("picture", RENDERED)
def test_picture_stays_in_its_frame(picture):
    for box in ElementTree.fromstring(picture.svg()).iter(f"{SVG}rect"):
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + width <= picture.width and y + height <= picture.height


def test_pictures_have_names_of_their_own():
    rendered = pictures.render()
    assert len(rendered) == len(pictures.PICTURES)


def luminance(color):
    """Relative luminance as WCAG 2 defines it."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", PAGE_BACKGROUNDS.values(), ids=PAGE_BACKGROUNDS.keys())
@pytest.mark.parametrize("tone", [tone for tone in pictures.TONES if tone != "none"])
def test_lines_have_enough_contrast(tone, background):
    light, dark = sorted((luminance(pictures.TONES[tone]), luminance(background)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


def test_padding_tables_say_when_nothing_is_measured(tmp_path):
    assert set(padding.render(tmp_path / "none.json").values()) == {"Not measured yet.\n"}


def test_answers_cannot_break_the_page():
    assert padding.one_line("a `b`\n\n c") == "`a 'b' c`"
    assert padding.one_line(" \n") == "(nothing)"
