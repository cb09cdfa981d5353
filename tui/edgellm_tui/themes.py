"""The screen's own two colour themes."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="edgellm-dark",
    primary="#6cc3a6",
    secondary="#8aa9d6",
    accent="#e0a458",
    warning="#e0b458",
    error="#e2777a",
    success="#7cc98f",
    foreground="#d8dee3",
    background="#12161a",
    surface="#181e24",
    panel="#222a32",
    dark=True,
    variables={"footer-key-foreground": "#6cc3a6", "input-selection-background": "#6cc3a6 35%"},
)

LIGHT = Theme(
    name="edgellm-light",
    primary="#1f7a5f",
    secondary="#38609c",
    accent="#a8641a",
    warning="#8f6206",
    error="#b03a3e",
    success="#2b7d43",
    foreground="#22282d",
    background="#fbfaf7",
    surface="#f2f0ea",
    panel="#e6e3da",
    dark=False,
    variables={"footer-key-foreground": "#1f7a5f", "input-selection-background": "#1f7a5f 30%"},
)
