"""``python -m cgplan``."""

from cgplan.cli.main import main

if __name__ == "__main__":
    main()
