"""Do slightly rotated copies of the training digits improve their recognition?"""
