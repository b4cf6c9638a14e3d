"""The pipeline: experiments, stages and units; their identity, the runner and the scheduler."""
