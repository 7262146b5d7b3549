"""`python -m flatpeak.controller` is the `flatpeak` command."""

from flatpeak.controller.cli import main

if __name__ == "__main__":
    main()
