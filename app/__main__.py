"""`python -m app`."""

from app.main import cli

if __name__ == "__main__":
    cli()
