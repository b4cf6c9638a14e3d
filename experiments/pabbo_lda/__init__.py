"""The main job: the optimizer that finds the number of LDA topics with the fewest trainings."""
