"""`python -m deltastore`: the command line."""

from __future__ import annotations

from deltastore.cli.main import main

if __name__ == "__main__":
    main()
