"""``raypipe init``: write a small project of the user's own, from a folder of ``templates/``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from raypipe.config.levels import near_and_all
from raypipe.errors import ConfigError

_TEMPLATES = Path(__file__).parent / "templates"
_NAMES = ("function", "training")


def init(name: str | None, template: str) -> str:
    """Write a project; return what was written and the commands to run next.

    Raises:
        ConfigError: the template does not exist, or the folder is not a new or an empty one.

    """
    if template not in _NAMES:
        listed = near_and_all(template, _NAMES)
        raise ConfigError(f"--template {template}: no such template{listed}")
    folder = Path(name if name is not None else f"my_{template}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is not an empty folder; give the name of a new one")
    files = [file for file in sorted((_TEMPLATES / template).iterdir()) if file.is_file()]
    readme = (_TEMPLATES / template / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("{name}", folder.resolve().name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "README.md").write_text(readme, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}") from error
    first = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)  # the commands to run
    written = [f"wrote {folder}/", *(f"  {file.name}" for file in files)]
    following = ["next:", f"cd {shlex.quote(str(folder))}", first[1] if first else ""]
    return "\n".join([*written, *following]).rstrip()
