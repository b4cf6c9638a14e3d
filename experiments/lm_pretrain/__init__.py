"""Language-model pretraining: a decoder-only transformer that predicts the next token."""

from experiments.lm_pretrain.pipeline import VERSION, stages
from experiments.lm_pretrain.settings import PretrainingSettings
from raypipe.experiment import Experiment

EXPERIMENT = Experiment("lm_pretrain", VERSION, PretrainingSettings, stages)
