"""Local web page over run directories, which are only read: ``raypipe ui``."""
