"""`python -m deployments` is the command `hexflow`."""

from deployments.cli.main import main

main()
