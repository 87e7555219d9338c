"""`python -m deployments` is the command `hexflow`."""

from deployments.cli import main

main()
