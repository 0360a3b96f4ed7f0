"""Compiles the C++ kernels while the package is built; everything else is in pyproject.toml.

The library is plain C to its caller, so one wheel serves every Python of a platform. Without a compiler the package is
built all the same, for any platform, and works with the kernels in torch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("weft/kernels/cpu")


def load_builder():
    """`weft.kernels.cpu.build`, by its file: the package is not importable while it is built."""
    spec = importlib.util.spec_from_file_location("weft_kernels_build", KERNELS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Puts the library beside `build.py`: in the build folder, or in the source tree for an editable installation."""

    def run(self):
        """Build what setuptools builds, then the library."""
        super().run()
        builder = load_builder()
        folder = KERNELS if self.editable_mode else Path(self.build_lib) / KERNELS
        try:
            builder.build((folder / builder.LIBRARY.name).resolve())
        except builder.BuildError as error:
            print(f"warning: the C++ kernels were not built: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform and any Python 3, where it holds the library."""

    def get_tag(self):
        """(python, abi, platform)"""
        library = Path(self.bdist_dir) / KERNELS / load_builder().LIBRARY.name
        if not library.exists():
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", self.plat_name.replace("-", "_").replace(".", "_")


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
