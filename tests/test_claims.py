"""The checks of the seed articles' claims still give what the page shows."""

import json
import re

import pytest

from shared.docs import claims
from shared.errors import UserError
from shared.steps import ROOT

PUBLISHED = json.loads(claims.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in claims.CHECKS if name != "warning"])
def test_check_gives_what_was_published(name):
    assert claims.CHECKS[name]() == PUBLISHED["checks"][name]


def test_oldest_and_newest_version_were_hunted():
    """The article's version logs the deprecation from prefill when nothing is passed, and -W error does not see it."""
    calls = PUBLISHED["hunts"]["4.43.4"]
    assert calls["calls"]["prefill, nothing passed"]["logged"]
    assert not calls["calls"]["prefill, empty DynamicCache"]["logged"]
    assert "raises" not in calls["prefill with -W error"]
    assert calls["prefill with a log handler that raises"]["raises"] == "RuntimeError"
    assert "5.24.0" in PUBLISHED["hunts"]


def test_every_check_is_shown_and_every_command_exists():
    page = (ROOT / "docs" / "articles.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"docs/generated/claims/([\w-]+)\.md", page))
    assert shown == {*claims.CHECKS, "hunts"} - {"warning"}
    assert set(re.findall(r"shared\.docs\.claims ([a-z][\w-]+)", page)) <= set(claims.CHECKS)


def test_what_is_not_measured_says_so(tmp_path):
    assert set(claims.render(tmp_path / "none.json").values()) == {"Not run yet.\n"}


def test_a_python_that_cannot_run_the_hunt_is_one_line(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="no torch here"):
        claims.hunt(str(broken))
