"""Configuration: YAML, overrides and profiles become one validated settings model."""
