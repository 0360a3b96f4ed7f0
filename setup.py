"""Installation: what pyproject.toml cannot say, which is that libraries in C and C++ are built if possible."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The package is not installed yet: its builders come from here, and need the standard library alone.
sys.path.insert(0, str(Path(__file__).parent))
from weft.kernels.cpu import build as kernels
from weft.native import BuildError
from weft.programs.sandbox import build_shim as shim

_BUILDERS = {
    "weft.kernels.cpu._weft_cpu": (kernels.build, "The kernels in C++ were not built, so slower ones"),
    "weft.programs.sandbox._weft_shim": (shim.build, "The shim in C was not built, so threads"),
}


class BuildLibraries(build_ext):
    """Builds libraries with a plain C interface; without them the package works, slower."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the interpreter's tag: one library serves every Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not."""
        build, otherwise = _BUILDERS[ext.name]
        target = Path(self.get_ext_fullpath(ext.name))
        # What an earlier build left must not pass for this one's.
        target.unlink(missing_ok=True)
        try:
            build(target)
        except BuildError as error:
            print(f"{otherwise} will be used: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The wheel is for a platform, and for any Python on it."""

    def get_tag(self) -> tuple[str, str, str]:
        """The platform's own tag, without the interpreter's."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in _BUILDERS],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
