"""Summarization with T5 and mT5."""
