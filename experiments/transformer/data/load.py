"""Selection of the data source."""

from __future__ import annotations

from experiments.transformer.data.sequences import load_builtin, load_sequences
from experiments.transformer.data.splits import Kind, Splits
from experiments.transformer.data.tables import load_table
from experiments.transformer.settings import TransformerDataSettings


def load(settings: TransformerDataSettings, kind: Kind | None) -> Splits | None:
    """Return the data of the settings; None for samples that are drawn at random.

    Raises:
        CorpusError: the data cannot be used.

    """
    loaders = {"builtin": load_builtin, "table": load_table, "sequences": load_sequences}
    loader = loaders.get(settings.source)
    return None if loader is None else loader(settings, kind)
