"""The checks of the seed articles' claims still give what the page shows."""

import json
import re

import pytest

from shared.docs import claims
from shared.steps import ROOT

PUBLISHED = json.loads(claims.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", list(claims.CHECKS))
def test_check_gives_what_was_published(name):
    assert claims.CHECKS[name]() == PUBLISHED["checks"][name]


def test_every_check_is_shown_and_every_command_exists():
    page = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"docs/generated/claims/([\w-]+)\.md", page))
    assert shown == set(claims.CHECKS)
    assert set(re.findall(r"shared\.docs\.claims ([a-z][\w-]+)", page)) <= set(claims.CHECKS)


def test_what_is_not_measured_says_so(tmp_path):
    assert set(claims.render(tmp_path / "none.json").values()) == {"Not run yet.\n"}
