"""``edgellm ps``: lists the servers of this user."""

from edgellm.cli.servers import ps as command

__all__ = ["command"]
