"""Compiles the native kernel library while the package is built; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).resolve().parent / "kernels" / "edgellm_kernels" / "native"


def load_builder() -> ModuleType:
    """The package's own builder, by path: the package is not installed yet."""
    specification = importlib.util.spec_from_file_location("edgellm_native_build", SOURCES / "build.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class BuildWithLibrary(build_py):
    """Beside the modules, the libraries; in an editable installation they lie beside the sources."""

    def run(self) -> None:
        super().run()
        builder = load_builder()
        if self.editable_mode:
            target = SOURCES / builder.BUILT
        else:
            target = Path(self.build_lib) / "edgellm_kernels" / "native" / builder.BUILT
        reason = builder.build_or_explain(target, SOURCES)
        if reason:
            print(f"edgellm: no native kernels, torch computes: {reason}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The libraries need no Python of a certain version, only the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
