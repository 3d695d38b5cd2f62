"""``python -m torchemo``: the ``torchemo`` command, where its script is not on the path."""

from torchemo.apps.cli import main

if __name__ == "__main__":  # processes that are started for this one import it again
    main()
