"""Runs the command line for `python -m redline`."""

from redline.cli import main

if __name__ == "__main__":
    main()
