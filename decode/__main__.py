"""`python -m decode COMMAND …`: the same as `specalign COMMAND …`."""

from specalign.__main__ import main

if __name__ == "__main__":
    main()
