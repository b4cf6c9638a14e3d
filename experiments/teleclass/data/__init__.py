"""Taxonomy and documents: read from files or built in, validated, held in Arrow arrays."""
