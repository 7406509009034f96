"""``python -m kvpager`` is the command ``kvpager``."""

from kvpager.cli import main

main()
