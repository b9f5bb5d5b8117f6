"""`python -m usp.launch`: the same program as generate.py."""

import sys

from usp.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
