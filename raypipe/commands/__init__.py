"""The commands: one module each; the command line only parses their arguments."""
