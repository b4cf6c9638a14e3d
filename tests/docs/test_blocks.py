"""The reader of pages notices what is wrong, and links are rewritten for the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import Block, Reader


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "PROJECT", tmp_path)
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("language", "text", "title", "message"),
    [
        ("bash", "raypipe run missing.yaml\n", "", "no such file"),
        ("bash", "raypipe doctor # exit status 2\n", "", "doctor"),
        ("bash", "sbatch job\n", "", "needs"),
        ("python", "assert 1 == 2, 'wrong'\n", "", "wrong"),
        ("text", "not printed\n", "Output", "not printed"),
        ("ruby", "puts 1\n", "", "cannot run"),
    ],
)
def test_what_is_wrong_on_a_page_fails(
    page: Path, tmp_path: Path, language: str, text: str, title: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        Reader(tmp_path).follow(Block(page, 1, language, title, text))


@pytest.mark.parametrize(
    ("page", "written", "expected"),
    [
        ("howto/gpu.md", "[a](../training.md#x)", "[a](../training.md#x)"),
        ("howto/gpu.md", "[a](../../README.md)", "[a](../project/README.md)"),
        ("security.md", "[a](../SECURITY.md)", "[a](project/SECURITY.md)"),
        ("project/README.md", "[a](docs/training.md)", "[a](../training.md)"),
        ("project/README.md", "[a](CONTRIBUTING.md#b)", "[a](CONTRIBUTING.md#b)"),
        ("faq.md", "[a](../raypipe/stats.py)", "a"),
        ("faq.md", "[a](https://x.org) [b](#c)", "[a](https://x.org) [b](#c)"),
        ("faq.md", "`[a](../x.py)`", "`[a](../x.py)`"),
        ("faq.md", "```text\n[a](../x.py)\n```\n", "```text\n[a](../x.py)\n```\n"),
    ],
)
def test_links_of_the_site(page: str, written: str, expected: str) -> None:
    pytest.importorskip("mkdocs")
    from docs.site_links import rewritten

    assert rewritten(written, page, None) == expected


def test_links_to_source_files_lead_to_the_repository() -> None:
    pytest.importorskip("mkdocs")
    from docs.site_links import rewritten

    expected = "[a](https://x.org/r/blob/main/raypipe/stats.py)"
    assert rewritten("[a](../raypipe/stats.py)", "faq.md", "https://x.org/r") == expected
