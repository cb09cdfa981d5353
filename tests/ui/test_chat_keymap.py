"""Keys and colours of the user's own: what a keymap may say, and that both hold in every session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgellm_models.errors import ConfigError
from edgellm_tui.app import EdgeChat
from edgellm_tui.keymap import MAX_KEYMAP_BYTES, read_keymap
from edgellm_tui.settings import ChatSettings
from edgellm_tui.themes import DARK, LIGHT, load_theme
from edgellm_tui.widgets.stats_panel import StatsPanel
from tests.support.fake_backend import FakeBackend
from tests.ui.screen_support import chat_screen, send, shown, status, until


def keymap(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return read_keymap(path)


def test_a_keymap_names_commands_and_keys(tmp_path: Path) -> None:
    assert read_keymap(tmp_path / "none.toml") == {}
    assert keymap(tmp_path, 'regenerate = "f5, ctrl+b"\ncompact = "alt+k"') == {
        "regenerate": "f5,ctrl+b",
        "compact": "alt+k",
    }
    # Two that change places.
    assert keymap(tmp_path, 'regenerate = "ctrl+e"\nedit_question = "ctrl+r"')["regenerate"] == "ctrl+e"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('regenrate = "f5"', "did you mean regenerate?"),
        ('rename = "f5"', "is no command with a key"),
        ("regenerate = 5", 'takes a key, such as "f5"'),
        ('regenerate = ""', "takes a key"),
        ('regenerate = "cntrl+b"', "'cntrl+b' is no key"),
        ('regenerate = "f99"', "'f99' is no key"),
        ('regenerate = "r"', "'r' alone is for writing"),
        ('regenerate = "ctrl+e"', "ctrl+e would be both regenerate and edit_question"),
        ('regenerate = "f5"\ncompact = "f5"', "f5 would be both"),
        ("regenerate", "is not valid TOML"),
        ("# " + "x" * MAX_KEYMAP_BYTES, "it should hold a few keys"),
    ],
)
def test_a_keymap_that_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keymap(tmp_path, text)
    assert said in str(caught.value) and "keys.toml" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 78


def test_keys_and_theme_are_the_screen_s_own_and_stay_when_the_model_brings_its_settings(
    tmp_path: Path,
) -> None:
    theme_file = tmp_path / "state" / "theme"

    async def scenario(first: bool) -> None:
        looks = ChatSettings(
            theme=load_theme(theme_file),
            theme_file=theme_file,
            keymap={"toggle_panel": "f7", "show_context": "f8"},  # the second has no key otherwise
        )
        opened = (FakeBackend(), ChatSettings(system_prompt="Be brief."))
        app = EdgeChat(opener=lambda notice: opened, settings=looks)
        async with app.run_test(size=(90, 30)) as pilot:
            await until(pilot, lambda: "Ask anything" in shown(app), "opened")
            assert app.theme == (DARK.name if first else LIGHT.name)
            await pilot.press("f7")
            assert chat_screen(app).query_one(StatsPanel).display
            await pilot.press("f2")
            assert chat_screen(app).query_one(StatsPanel).display
            await pilot.press("f8")
            await until(pilot, lambda: "context: 30 of 8,192" in shown(app), "the context")
            await pilot.press("ctrl+p")
            await pilot.press(*"toggle panel")
            await until(pilot, lambda: "(f7)" in shown(app), "the palette says the new key")
            await pilot.press("escape")
            await send(pilot, app, "/theme light", wait=False)
            assert status(app).hint == ""

    asyncio.run(scenario(True))
    assert load_theme(theme_file) == LIGHT.name
    asyncio.run(scenario(False))
    assert load_theme(tmp_path) == load_theme(tmp_path / "none") == ""
