"""Language-model pretraining: a decoder-only transformer that predicts the next token."""
