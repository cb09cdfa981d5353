"""``edgellm stop``: ends a server of this user."""

from edgellm.cli.servers import stop as command

__all__ = ["command"]
