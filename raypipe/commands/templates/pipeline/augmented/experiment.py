"""The experiment: its stages in the order of what they need, its tables and its report."""

from augmented.evaluation import MEASURES, run_evaluate
from augmented.prepare import run_prepare
from augmented.report import sections
from augmented.settings import AugmentedSettings
from augmented.training import build_task
from raypipe import Experiment, Stage, train_stage


def stages(settings):
    """Return prepare, train and evaluate."""
    return [
        Stage("prepare", run_prepare, reads=("prepare",)),
        train_stage("train", settings.train, build_task, needs=("prepare",)),
        Stage("evaluate", run_evaluate, needs=("train",), reads=("model",)),
    ]


#: raise the version, here 1, when results change
EXPERIMENT = Experiment("augmented", 1, AugmentedSettings, stages, sections, tables=(MEASURES,))
