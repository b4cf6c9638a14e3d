"""Build hook of the wheel: put the experiments and configurations into ``raypipe/shipped``.

A top-level package ``experiments`` in site-packages would clash with a user's own. So the modules
import each other as ``raypipe.shipped.experiments`` in the wheel; nothing else is changed.
``raypipe/config/shipped.py`` finds them.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IMPORT = re.compile(rb"^(\s*(?:from|import) )experiments\b", re.MULTILINE)
_SHIPPED = (("experiments", ".py"), ("experiments", ".safetensors"), ("configs", ".yaml"))
_ABOUT = '"""Experiments and configurations of raypipe; `raypipe run --list` lists them."""\n'


class ShippedHook(BuildHookInterface):
    """Adds the files; an editable installation uses the repository's own folders."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files to a temporary folder, and have it included."""
        if version == "editable":
            return
        self._folder = TemporaryDirectory()
        target = Path(self._folder.name)
        (target / "__init__.py").write_text(_ABOUT, encoding="utf-8")
        for folder, suffix in _SHIPPED:
            for file in (Path(self.root) / folder).rglob(f"*{suffix}"):
                content = file.read_bytes()
                if suffix == ".py":
                    content = _IMPORT.sub(rb"\1raypipe.shipped.experiments", content)
                written = target / file.relative_to(self.root)
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_bytes(content)
        build_data["force_include"][str(target)] = "raypipe/shipped"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder."""
        if version != "editable":
            self._folder.cleanup()
