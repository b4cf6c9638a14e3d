"""Code that several experiments share: tokenizers, blocks of rows as tasks, pretrained models."""
