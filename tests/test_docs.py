"""Python in docs/ runs as it stands, and links lead somewhere."""

import re
from pathlib import Path

import pytest

import autoshard.api

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=str)
RUN = [page for page in PAGES if page.parent.name == "docs" and "```python" in page.read_text()]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), page.name, "exec"), {"__name__": page.stem})


def test_the_first_screen_shows_what_is_emitted():
    page = (ROOT / "README.md").read_text()
    command = re.search(r"`autoshard compile (\S+) --cluster (\S+) --mesh (\S+) --out out`", page)
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]
    workload, cluster, mesh = command.groups()
    assert shown in autoshard.api.compile(workload, cluster, mesh=mesh).files["model.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_spoken_of_exist(page):
    """A path with a folder in backquotes, from the root or within autoshard/, is there."""
    paths = re.findall(r"`((?:autoshard|passes|models|tests|docs|cost)/[\w./]*\w(?:/|\.\w+))`", page.read_text())
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "autoshard" / path).exists()]
    assert missing == []
