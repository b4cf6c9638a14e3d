"""Section of the report, made from the tables alone."""

from raypipe.report.plots import Plot, new_axes, rows, style
from raypipe.report.sections import Section, TableView


def sections(tables):
    """Return the sections of the experiment; none before its evaluation."""
    found = rows(tables, "measures")
    if found is None:
        return []
    bold = [digit == "all" for digit in found["digit"]]
    table = TableView(found, ["digit", "images", "recall"], "recall by digit", bold)
    return [Section("Recognized digits", [_plot(found[found["digit"] != "all"]), table])]


def _plot(found):
    with style():
        figure, axes = new_axes()
        axes.bar(found["digit"], 100 * found["recall"])
        axes.set_xlabel("digit")
        axes.set_ylabel("recognized, %")
        return Plot("recall", "Recall", "Of the held-out images of each digit.", figure)
