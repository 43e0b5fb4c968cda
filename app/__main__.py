"""`python -m app`."""

import sys

try:
    from app.main import cli

    if __name__ == "__main__":
        cli()
except KeyboardInterrupt:  # before a run answers signals itself, in app/utils/tasks.py
    sys.exit(130)
