"""raypipe's training loop against other ways to write one."""
