"""The screens: chat, help, and what is shown while a model loads."""
