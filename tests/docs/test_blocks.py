"""The reader of pages notices what is wrong, and links are rewritten for the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import Block, Reader, blocks, commands

PAGE = """# A page

`named.py`, in any folder:

```python
x = 1
```

1. A list:

    ```bash
    # needs a GPU
    raypipe doctor
    ```

```yaml title="a.yaml"
a: 1
```

```text title="Output"
1
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "PROJECT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    return page


def test_blocks_have_names_requirements_and_places(page: Path) -> None:
    found = blocks(page)
    assert [block.title for block in found] == ["named.py", "", "a.yaml", "Output"]
    assert [block.needs for block in found] == ["", "a GPU", "", ""]
    assert [block.is_file for block in found] == [True, False, True, False]
    assert found[1].text == "# needs a GPU\nraypipe doctor\n"
    assert found[0].place == "page.md:5"


def block(page: Path, language: str, text: str, title: str = "") -> Block:
    return Block(page, 1, language, title, text)


def test_commands_have_an_environment_and_a_status(page: Path) -> None:
    text = "A='b c' raypipe run x.yaml \\\n  y=1 # exit status 2\n\n# nothing\nexport C=d\n"
    first, second = commands(block(page, "bash", text))
    assert (first.words, first.environment) == (["raypipe", "run", "x.yaml", "y=1"], {"A": "b c"})
    assert (first.status, second.words, second.environment) == (2, [], {"C": "d"})


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
        Reader(tmp_path).follow(block(page, language, text, title))


def test_a_script_sees_files_and_earlier_names(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for text in ("VALUE = 1\n", "VALUE = 2\n"):  # an edited module is read again
        reader.follow(block(page, "python", text, "module.py"))
        reader.follow(block(page, "python", "import module\nprint(module.VALUE)\n"))
    reader.follow(block(page, "text", "2\n", "Output"))
    reader.follow(block(page, "python", "print(module.VALUE + 1, 'end')\n"))
    reader.follow(block(page, "text", "3 ...\n", "Output"))


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
