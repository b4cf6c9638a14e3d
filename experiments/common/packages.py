"""Versions of the packages that decide a result."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str | None:
    """Return the installed version of a package, without importing it; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
