"""Saved chats: trees of messages in one SQLite file, searched, exported, and never lost to a crash."""
