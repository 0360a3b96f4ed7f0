"""Installation: what pyproject.toml cannot say, which is that the kernels in C++ are compiled if that is possible."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


def _builder() -> ModuleType:
    """`weft.kernels.cpu.build`, by its path: the package and what it needs are not installed yet."""
    path = Path(__file__).parent / "weft" / "kernels" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("weft_kernel_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Builds one library with a plain C interface; without it the package works, slower."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the interpreter's tag: one library serves every Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not."""
        builder, target = _builder(), Path(self.get_ext_fullpath(ext.name))
        # What an earlier build left must not pass for this one's.
        target.unlink(missing_ok=True)
        try:
            builder.build(target)
        except builder.BuildError as error:
            print(f"The kernels in C++ were not built, so slower ones will be used: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The wheel is for a platform, and for any Python on it."""

    def get_tag(self) -> tuple[str, str, str]:
        """The platform's own tag, without the interpreter's."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("weft.kernels.cpu._weft_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
