"""GPU training core: a plain PyTorch training loop and its parts, independent of Ray."""
