"""raypipe: a parallel experiment runner on Ray.

One experiment, one YAML file, one command; every result is a row in Parquet.
"""

from importlib.metadata import PackageNotFoundError, version

from raypipe.errors import ConfigError
from raypipe.pipeline.experiment import Experiment, Stage, Unit

__all__ = ["ConfigError", "Experiment", "Stage", "Unit", "__version__"]

try:
    __version__ = version("raypipe-runner")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"
