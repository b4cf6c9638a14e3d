"""Trackers: TensorBoard, MLflow and Weights & Biases."""
