"""Where edgellm keeps its files: platform folders, moved by EDGELLM_HOME, made only when written to."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgellm_models.errors import OutputError, PermissionDeniedError


@dataclass(frozen=True)
class Locations:
    """The five folders of one user. Reading them never makes them; ``ensure`` does."""

    config: Path
    """config.toml."""
    data: Path
    """Models and chats."""
    cache: Path
    """Safe to delete."""
    state: Path
    """Logs and prompt history."""
    runtime: Path
    """Sockets and server files, for this user only."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Locations:
        """The platform's folders, or config, data, cache, state and run under EDGELLM_HOME."""
        environ = os.environ if environ is None else environ
        home = environ.get("EDGELLM_HOME", "")
        if home:
            root = Path(os.path.abspath(os.path.expanduser(home)))
            return cls(root / "config", root / "data", root / "cache", root / "state", root / "run")
        from platformdirs import PlatformDirs

        dirs = PlatformDirs("edgellm", appauthor=False)
        with warnings.catch_warnings():
            # platformdirs warns where there is no XDG_RUNTIME_DIR; ensure_runtime checks the fallback itself.
            warnings.simplefilter("ignore")
            runtime = dirs.user_runtime_path
        return cls(
            dirs.user_config_path, dirs.user_data_path, dirs.user_cache_path, dirs.user_state_path, runtime
        )

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def ensure(self, folder: Path) -> Path:
        """Makes one of these folders (or one below) and returns it. OutputError when that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make the folder {folder}: {error.strerror}; EDGELLM_HOME moves it"
            ) from None
        return folder

    def ensure_runtime(self) -> Path:
        """Makes the runtime folder with mode 0700.

        The fallback of some systems lies in a shared temporary folder, where anyone could have made it first:
        a link, or a folder of another user, is PermissionDeniedError.
        """
        if os.name != "posix":
            return self.ensure(self.runtime)
        self.ensure(self.runtime.parent)
        try:
            self.runtime.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise OutputError(f"cannot make the folder {self.runtime}: {error.strerror}") from None
        found = os.lstat(self.runtime)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionDeniedError(
                f"the runtime folder {self.runtime} is not this user's; remove it or set EDGELLM_HOME"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            self.runtime.chmod(0o700)
        return self.runtime
