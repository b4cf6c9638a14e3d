"""PABBO: its model, its training on synthetic functions and on curves, and its evaluation."""
