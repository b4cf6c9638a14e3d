"""The GPU training core: a plain PyTorch loop and its parts, free of Ray."""
