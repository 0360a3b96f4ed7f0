"""Installation: what pyproject.toml cannot say, which is that libraries in C and C++ are built if possible."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_BUILDERS = {
    "weft.kernels.cpu._weft_cpu": ("weft/kernels/cpu/build.py", "The kernels in C++ were not built, so slower ones"),
    "weft.programs.sandbox._weft_shim": (
        "weft/programs/sandbox/build_shim.py",
        "The shim in C was not built, so threads",
    ),
}


def _builder(place: str) -> ModuleType:
    """A module that builds a library, by its path: the package and what it needs are not installed yet."""
    path = Path(__file__).parent / place
    spec = importlib.util.spec_from_file_location(f"weft_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildLibraries(build_ext):
    """Builds libraries with a plain C interface; without them the package works, slower."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the interpreter's tag: one library serves every Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not."""
        place, otherwise = _BUILDERS[ext.name]
        builder, target = _builder(place), Path(self.get_ext_fullpath(ext.name))
        # What an earlier build left must not pass for this one's.
        target.unlink(missing_ok=True)
        try:
            builder.build(target)
        except builder.BuildError as error:
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
