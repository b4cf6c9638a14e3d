"""Corpora: the built-in one, bag-of-words files, text files and tables."""
