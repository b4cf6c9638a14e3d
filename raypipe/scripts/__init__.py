"""Scripts: a user's own training command as a stage (``experiment: raypipe.scripts``)."""
