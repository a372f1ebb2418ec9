"""Run the command line by ``python -m volley.cli``, as torchrun does."""

from volley.cli import main

main()
