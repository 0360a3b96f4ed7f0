"""Names of the library are what they are, whatever was imported before."""

import subprocess
import sys

import pytest


def test_no_module_takes_the_place_of_a_function_once_it_is_imported() -> None:
    source = (
        "import weft.sdk, pkgutil, importlib\n"
        "before = {name: getattr(weft.sdk, name) for name in weft.sdk.__all__}\n"
        "for module in pkgutil.iter_modules(weft.sdk.__path__):\n"
        "    importlib.import_module(f'weft.sdk.{module.name}')\n"
        "weft.sdk.preload()\n"
        "print([name for name in before if getattr(weft.sdk, name) is not before[name]])\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_old_name_of_run_works_and_warns() -> None:
    import weft.sdk.session

    with pytest.warns(DeprecationWarning, match=r"weft\.sdk\.run"):
        assert weft.sdk.session.send is weft.sdk.run.send
