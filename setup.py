"""Builds the libraries in C and C++ at installation, if possible. pyproject.toml has all other metadata."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The package is not installed yet: its builders are imported from this directory and need only the standard library.
sys.path.insert(0, str(Path(__file__).parent))
from weft.kernels.cpu import build as kernels
from weft.native import BuildError
from weft.programs.sandbox import build_shim as shim

_BUILDERS = {
    "weft.kernels.cpu._weft_cpu": (kernels.build, "The kernels in C++ were not built, so slower ones"),
    "weft.programs.sandbox._weft_shim": (shim.build, "The shim in C was not built, so threads"),
}


class BuildLibraries(build_ext):
    """Builds libraries with a plain C interface. The package works without them, but slower."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file name without the interpreter's tag: one library serves every Python version."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile a library, or print why it was not built."""
        build, otherwise = _BUILDERS[ext.name]
        target = Path(self.get_ext_fullpath(ext.name))
        # A library of an earlier build must not be mistaken for this one.
        target.unlink(missing_ok=True)
        try:
            build(target)
        except BuildError as error:
            print(f"{otherwise} will be used: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python version on it."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the platform, without one of the interpreter."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in _BUILDERS],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
