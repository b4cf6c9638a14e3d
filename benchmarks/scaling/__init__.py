"""What raypipe itself costs: units that do next to nothing, counted and timed."""
