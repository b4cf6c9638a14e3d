"""The same grid of 15 calls in several tools, and what each keeps when it is killed."""
