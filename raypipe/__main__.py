"""``python -m raypipe``: the same as ``raypipe``."""

from raypipe.cli import main

if __name__ == "__main__":
    main()
