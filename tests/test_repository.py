"""What the repository says of itself is true: dependencies, versions, documents, contents of the package."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from weft.cli.probe import REQUIRED

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
README = (ROOT / "README.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PACKAGE = sorted((ROOT / "weft").rglob("*.py"))

RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
DEVELOPMENT = [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]]
BY_NAME_ONLY = {"httptools": "httptools_impl", "uvloop": 'loop="uvloop"'}
"""Dependencies that uvicorn imports for us, and what tells it to."""
NOT_PINNED = re.compile(r"(nvidia|cuda)\b")
"""What torch's builds for GPUs bring; each build pins its own."""
WITH_TORCH = {"triton": {"weft/kernels/triton"}}
"""What torch's builds for GPUs bring and the package may import, and where: modules that are loaded on GPUs alone."""


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = [p for p in pinned if p.marker is None or p.marker.evaluate()]
    assert all(len(p.specifier) == 1 and str(p.specifier).startswith("==") for p in pinned)
    names = [canonicalize_name(p.name) for p in pinned]
    assert len(set(names)) == len(names)
    return {name: str(p.specifier).removeprefix("==") for name, p in zip(names, pinned, strict=True)}


def installed_closure(requirements: list[Requirement]) -> set[str]:
    """The names of everything that these bring into this environment."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(r, frozenset({""})) for r in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        wanted = frozenset({"", *requirement.extras})
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        found.add(name)
        brought = importlib.metadata.distribution(name).requires or []
        waiting += [(Requirement(text), wanted) for text in brought]
    return found


def third_party_imports() -> dict[str, set[str]]:
    """Distribution -> the files of the package that import it."""
    owners = importlib.metadata.packages_distributions()
    found: dict[str, set[str]] = {}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                if any(path.is_relative_to(ROOT / place) for place in WITH_TORCH.get(top, ())):
                    continue
                if top != "weft" and top not in sys.stdlib_module_names:
                    assert top in owners, f"{path} imports {top}, which is not installed"
                    found.setdefault(canonicalize_name(owners[top][0]), set()).add(str(path.relative_to(ROOT)))
    return found


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def text_files() -> Iterator[Path]:
    """All files of the repository but generated ones, in a git checkout or not."""
    for part in ("weft", "tests", "training", "bench", "demo", "docs", ".ci"):
        yield from (
            p for p in (ROOT / part).rglob("*") if p.suffix in {"", ".py", ".md", ".toml", ".jinja", ".sh", ".json"}
        )
    yield from (p for p in ROOT.iterdir() if p.suffix in {".md", ".toml", ".txt"})
    yield from (ROOT / name for name in ("Makefile", "Containerfile", ".dockerignore", ".gitignore", "NOTICE"))


class TestDependencies:
    def test_every_dependency_is_pinned_within_its_range(self) -> None:
        pinned = pins()
        for requirement in RUNTIME + DEVELOPMENT:
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"

    def test_pins_are_exactly_what_dependencies_bring(self) -> None:
        brought = {name for name in installed_closure(RUNTIME + DEVELOPMENT) if not NOT_PINNED.match(name)}
        assert brought == set(pins())

    def test_every_dependency_of_the_package_is_imported_by_it(self) -> None:
        imported = third_party_imports()
        for requirement in RUNTIME:
            name = canonicalize_name(requirement.name)
            if name in BY_NAME_ONLY:
                assert any(BY_NAME_ONLY[name] in path.read_text() for path in PACKAGE), name
            else:
                assert name in imported, f"nothing in weft/ imports {name}"

    def test_the_package_imports_nothing_else(self) -> None:
        declared = {canonicalize_name(requirement.name) for requirement in RUNTIME}
        undeclared = {name: files for name, files in third_party_imports().items() if name not in declared}
        assert not undeclared

    def test_doctor_asks_for_nothing_else(self) -> None:
        owners = importlib.metadata.packages_distributions()
        declared = {canonicalize_name(requirement.name) for requirement in RUNTIME}
        assert {canonicalize_name(owners[module][0]) for module in REQUIRED} <= declared

    def test_readme_says_why_each_is_there(self) -> None:
        section = README.partition("## Dependencies")[2].partition("\n## ")[0]
        for requirement in RUNTIME + DEVELOPMENT:
            assert re.search(rf"\b{re.escape(requirement.name)}\b", section), requirement.name


class TestVersions:
    def test_every_place_names_the_same_pythons(self) -> None:
        supported = SpecifierSet(PROJECT["requires-python"])
        minors = [minor for minor in range(30) if supported.contains(f"3.{minor}.0")]
        first, last = minors[0], minors[-1]
        assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py3{first}"
        assert PYPROJECT["tool"]["mypy"]["python_version"] == f"3.{first}"
        classifiers = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
        assert classifiers == [f"3.{minor}" for minor in minors]
        makefile = (ROOT / "Makefile").read_text()
        assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in makefile
        images = re.findall(r"^FROM python:3\.(\d+)-slim", (ROOT / "Containerfile").read_text(), re.MULTILINE)
        assert images
        assert set(map(int, images)) <= set(minors)


class TestDocuments:
    @pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
    def test_links_lead_somewhere(self, document: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if not target.startswith(("http://", "https://", "#")):
                path = document.parent / target.partition("#")[0]
                assert path.exists(), f"{document.name} links to {target}"

    @pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
    def test_files_of_the_package_that_are_named_exist(self, document: Path) -> None:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md))`", document.read_text()):
            assert (ROOT / "weft" / name).exists() or (ROOT / name).exists(), f"{document.name} names {name}"

    def test_architecture_names_every_layer(self) -> None:
        contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
        layers = next(c["layers"] for c in contracts if c["type"] == "layers")
        architecture = (ROOT / "docs/architecture.md").read_text()
        for name in re.findall(r"\w+", " ".join(layers)):
            assert re.search(rf"^\|.*`{name}`.*\|", architecture, re.MULTILINE), name

    def test_glossary_terms_are_words_of_the_code(self) -> None:
        code = "\n".join(path.read_text() for path in PACKAGE).lower()
        terms = re.findall(r"\*\*([^*]+)\*\*", GLOSSARY)
        assert terms
        assert len(set(terms)) == len(terms)
        written = {term: re.sub("[- ]", "[-_ ]?", term.lower()) for term in terms}
        missing = [term for term in terms if not re.search(rf"\b{written[term]}", code)]
        assert not missing

    def test_nothing_depends_on_one_machine(self) -> None:
        elsewhere = re.compile(
            r"(?<![\w.])/(root|work|mnt|Users|home/(?!(weft|somebody)\b)|opt/(?!weft\b))[\w/]|file:/" + "/"
        )
        for path in text_files():
            if path.is_file() and path != Path(__file__):
                match = elsewhere.search(path.read_text(errors="replace"))
                assert match is None, f"{path.relative_to(ROOT)} has {match}"


class TestStructure:
    def test_class_names_stand_once_but_for_the_twins_of_the_glossary(self) -> None:
        places: dict[str, list[str]] = {}
        for path in PACKAGE:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
        shared = {name for name, found in places.items() if len(found) > 1}
        _, _, twins = GLOSSARY.partition("## Class names that occur twice")
        rows = re.findall(r"^\| (`.*?) \|", twins, re.MULTILINE)
        assert shared == set(re.findall(r"`(\w+)`", " ".join(rows))), {name: places[name] for name in shared}

    def test_modules_do_not_import_each_other_in_a_circle(self) -> None:
        """Imports inside functions and under `TYPE_CHECKING` count: a reader follows them too."""
        modules = {_module_name(path) for path in PACKAGE}
        imports: dict[str, set[str]] = {}
        for path in PACKAGE:
            found = imports.setdefault(_module_name(path), set())
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    names = {f"{node.module}.{alias.name}" for alias in node.names}
                    found.update(name if name in modules else node.module for name in names)
            found &= modules
            found.discard(_module_name(path))
        # Raises `CycleError`, which names the modules.
        graphlib.TopologicalSorter(imports).prepare()


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class TestPackaging:
    def test_ci_script_runs(self) -> None:
        script = ROOT / ".ci/run"
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True)

    @pytest.mark.slow
    def test_wheel_holds_the_whole_package_and_nothing_else(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "weft", source / "weft", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
        # Without a compiler: what is left out then is the library alone.
        without = os.environ | {"CXX": str(tmp_path / "no-compiler"), "CC": str(tmp_path / "no-compiler")}
        subprocess.run(
            [sys.executable, "-c", build], cwd=source, env=without, check=True, capture_output=True, timeout=120
        )
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            packed = {name for name in archive.namelist() if ".dist-info/" not in name}
            licenses = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
        assert packed == {str(p.relative_to(source)) for p in (source / "weft").rglob("*") if p.is_file()}
        assert "weft/assets/weft-tiny/model.safetensors" in packed
        assert "weft/py.typed" in packed
        assert licenses == {"LICENSE", "NOTICE"}
