"""Prior-fitted surrogate of expensive functions, with weights that ship."""
