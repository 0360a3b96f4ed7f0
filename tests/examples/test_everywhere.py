"""Every example runs with its defaults, trusted and in the sandbox, and says the same in both."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.help import EXAMPLES, Lab

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SHORT: dict[str, dict[str, Any]] = {
    "agent_swarm": {"problems": ["I walk 12 miles each day for 19 days. How far is that?"], "workers": 2},
    "attention_sink": {"max_tokens": 12},
    "best_of_n": {"n": 2, "max_tokens": 12},
    "graph_of_thought": {"notes": ["bread: $4, milk: $2", "soap: $3, tea: $5"]},
    "jacobi_decoding": {"max_tokens": 12},
    "mcts": {"rounds": 1},
    "recursion_of_thought": {"problem": "(12 + 34) * 21"},
    "self_consistency": {"samples": 2},
    "skeleton_of_thought": {"max_tokens": 16},
    "text_completion": {"max_tokens": 12},
    "tree_of_thought": {"numbers": [1, 2, 3], "proposals": 2, "target": 6},
    "watermarking": {"max_tokens": 12},
    "windowed_attention": {"max_tokens": 12},
}
"""Where the defaults take long. The other tests of this folder run those that matter."""
STANDARD = {"ast", "asyncio", "collections", "dataclasses", "fractions", "itertools", "json", "math", "operator"}
STANDARD |= {"random", "re"}
PAPER = re.compile(r"\(.*(19|20)\d\d\)|Prompt Lookup Decoding|transformers")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_what_it_is(name: str) -> None:
    source = Path(EXAMPLES / f"{name}.py").read_text()
    tree = ast.parse(source)
    doc = ast.get_docstring(tree) or ""
    assert "Returns" in doc
    assert "Arguments:" in doc
    assert PAPER.search(doc.rpartition("\n\n")[2]), "the last paragraph names the paper"
    assert len(source.splitlines()) <= 100
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in imported if not (module or "").startswith("weft.sdk")} <= STANDARD


@pytest.mark.parametrize("name", NAMES)
def test_an_example_does_the_same_in_the_sandbox(lab: Lab, name: str) -> None:
    args = SHORT.get(name)
    trusted = lab.told(name, args)
    # What the first run kept for the tenant is there for the second one; the other tests look at that.
    lab.forget()
    sandboxed = lab.told(name, args, trusted=False)
    assert plain(sandboxed) == plain(trusted)
    lab.forget()


def test_all_techniques_are_there() -> None:
    assert len(NAMES) == 25


DIFFERS = ("imported", "computed", "reused", "steps", "graph")
"""What an earlier run left behind, and what is in the order in which things were done."""


def plain(value: Any) -> Any:
    """Without what may differ; floats as far as the order of a batch leaves them alone."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-5)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in DIFFERS}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return json.loads(json.dumps(value))
