"""The transformer trainer: a classifier or regressor of tables and of sequences."""

from experiments.transformer.pipeline import VERSION, stages
from experiments.transformer.settings import TrainerSettings
from raypipe.experiment import Experiment

EXPERIMENT = Experiment("transformer", VERSION, TrainerSettings, stages)
