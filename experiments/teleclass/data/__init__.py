"""The taxonomy and its documents: read from files or built in, checked, in Arrow's memory."""
