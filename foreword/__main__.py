"""`python -m foreword` is the `foreword` command."""

import sys

from foreword.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
