"""Function experiments: each call of a plain function is a unit, its returned values are a row."""
