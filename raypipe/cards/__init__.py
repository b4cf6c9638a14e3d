"""Prediction of the memory and speed of a training on a card, without a GPU."""
