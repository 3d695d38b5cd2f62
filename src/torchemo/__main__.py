"""``python -m torchemo``: the ``torchemo`` command, where its script is not on the path."""

from torchemo.apps.cli import main

main()
