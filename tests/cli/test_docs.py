"""What the documentation says of settings and commands is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from weft.cli.main import app
from weft.cli.options import FLAGS
from weft.cli.settings import OTHER_VARIABLES, SECTIONS, keys, load
from weft.config import Config

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.*?) \| (.+) \|$")


def table() -> dict[str, tuple[str, str, str]]:
    """`section.name` -> default, flags, meaning."""
    rows, section = {}, ""
    for line in (DOCS / "configuration.md").read_text().splitlines():
        if line.startswith("### ["):
            section = line[5:-1]
        elif section and (match := ROW.match(line)):
            rows[f"{section}.{match[1]}"] = match[2], match[3], match[4]
    return rows


def test_every_setting_is_documented_in_order():
    assert list(table()) == keys()


def test_defaults_and_flags_are_those_of_the_code():
    for key, (default, flags, _) in table().items():
        section, _, name = key.partition(".")
        value = getattr(getattr(Config(), section), name)
        assert default == ("not set" if value is None else f"`{msgspec.json.encode(value).decode()}`"), key
        assert flags == (", ".join(f"`{one}`" for one in FLAGS[key].names) if key in FLAGS else ""), key


def test_every_flag_is_of_a_setting():
    assert set(FLAGS) <= set(keys())


def test_other_variables_are_documented():
    text = (DOCS / "configuration.md").read_text()
    assert all(f"`{name}`" in text for name in OTHER_VARIABLES)


def test_the_example_file_is_valid(tmp_path: Path):
    [example] = re.findall(r"```toml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "weft.toml"
    file.write_text(example)
    assert load(file=file).config.engine.kv_cache_bytes == 4 << 30
    assert set(tomllib.loads(example)) == set(SECTIONS)


def test_every_command_is_documented():
    text = (DOCS / "cli.md").read_text()
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert all(f"`weft {name}`" in text for name in names)


def test_examples_use_flags_that_exist(weft):
    text = (DOCS / "cli.md").read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines() if not language else ():
            words = line.partition("weft ")[2].split()
            command = words[:2] if words[0] in ("bench", "programs", "sim", "workflow") else words[:1]
            shown = weft(*command, "--help").output
            for flag in re.findall(r"--[\w-]+", line.partition("weft ")[2]):
                assert flag in shown, (line, flag)
