"""``python -m edgellm`` is the command ``edgellm``."""

from edgellm.cli.main import main

if __name__ == "__main__":
    main()
