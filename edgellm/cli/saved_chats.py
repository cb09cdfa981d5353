"""What the commands share of saved chats: where they lie, and the notices of opening them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from edgellm.locations import Locations
from edgellm_models.errors import ConfigError

if TYPE_CHECKING:
    from edgellm.cli.runtime import OnNotice
    from edgellm.history.kv_files import KVFiles
    from edgellm.history.store import HistoryStore

KV_MEGABYTES = 2000
"""Of the cache folder that the KV of saved chats may take, unless EDGELLM_CHAT_KV says otherwise."""


def open_history(on_notice: OnNotice) -> HistoryStore:
    """The store of this user. Its errors: history/store.py."""
    from edgellm.history.store import HistoryStore, chats_file
    from edgellm.log import log_notice

    locations = Locations.from_environment()
    store = HistoryStore(chats_file(locations.ensure(locations.data)))
    for notice in store.notices:
        log_notice(notice)
        on_notice(notice)
    return store


def kv_files() -> KVFiles:
    """The KV files of saved chats. ConfigError when EDGELLM_CHAT_KV is no number."""
    from edgellm.history.kv_files import KVFiles

    text = os.environ.get("EDGELLM_CHAT_KV", "")
    try:
        megabytes = float(text) if text else KV_MEGABYTES
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < 1e9:
        raise ConfigError(f"EDGELLM_CHAT_KV must be a number of megabytes, 0 or more, not {text!r}")
    return KVFiles(Locations.from_environment().cache / "chats", int(megabytes * 1e6))
