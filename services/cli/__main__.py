"""`python -m services.cli` is `baton`."""

from services.cli import main

main()
