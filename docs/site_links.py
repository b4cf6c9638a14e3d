"""Hook of MkDocs: pages of the project's root, and links from ``docs/`` to files outside it.

On GitHub a link from a page to ``../README.md`` or to a source file works as it is. In the site the
Markdown files of the root are pages below ``project/``, and links to any other file lead to the
repository if ``RAYPIPE_REPOSITORY`` gives its address; otherwise only their text remains.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")

#: inline code is matched first, so that a link inside it stays as it is
_LINK = re.compile(r"(`+).+?\1|\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the Markdown files of the project's root."""
    for name in ROOT_PAGES:
        text = (PROJECT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"project/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    return rewritten(markdown, page.file.src_uri, config.repo_url)


def rewritten(markdown: str, page: str, repository: str | None) -> str:
    """Return a page's text with its relative links as the site needs them.

    Args:
        markdown: the text.
        page: the page's path in the site's sources, such as ``howto/gpu.md``.
        repository: the repository's address; None if it is unknown.

    """
    at_root = page.removeprefix("project/")
    source = at_root if at_root in ROOT_PAGES else f"docs/{page}"

    def replace(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        if target is None or re.match(r"[a-z]+:|#|/", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in ROOT_PAGES:
            path = f"project/{path}"
        elif path.startswith("docs/") and not path.endswith(".py"):
            path = path.removeprefix("docs/")
        elif repository is None:
            return str(text)
        else:
            return f"[{text}]({repository}/blob/main/{path}{mark}{anchor})"
        relative = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"[{text}]({relative}{mark}{anchor})"

    fenced = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.DOTALL | re.MULTILINE)
    parts = fenced.split(markdown)
    parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)
