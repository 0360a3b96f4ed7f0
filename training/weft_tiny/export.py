"""Writing a checkpoint as the package's model directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.weft_tiny.state import RunState, default_directory
from training.weft_tiny.tokenizer import END_OF_TEXT, IM_END, write
from training.weft_tiny.train import ASSET, make_config


def newest(state: Path) -> dict[str, Any]:
    """The content of the newest valid checkpoint of a state directory.

    Raises:
        FileNotFoundError: the directory has no valid checkpoint.
    """
    with RunState(state).newest() as file:
        if file is None:
            raise FileNotFoundError(f"no valid checkpoint in {state}: train first, or give another --state")
        return dict(torch.load(file, map_location="cpu"))


def halved(value: Any) -> Any:
    """The same nested value with its float32 matrices and vectors in bfloat16."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.bfloat16) if value.ndim and value.dtype == torch.float32 else value
    if isinstance(value, dict):
        return {key: halved(entry) for key, entry in value.items()}
    return value


def compact(state: dict[str, Any], out: Path) -> None:
    """Write a resumable state of about 21 MB: weights and moments in bfloat16, without the running average."""
    kept = {name: halved(value) for name, value in state.items() if name != "average"}
    torch.save(kept, out)
    print(f"{out.stat().st_size / 1e6:.1f} MB after {state['seen'] / 1e6:.2f}M tokens -> {out}")


def export(state: dict[str, Any], out: Path) -> None:
    """Write the averaged weights in bfloat16 with the configuration files."""
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in state["average"].items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt", "tokens": str(state["seen"])})
    (out / "model.safetensors").chmod(0o644)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    write(tokenizer, out)
    config = make_config(tokenizer)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    shape = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
    shape = {"rope_theta": config.rope_parameters["rope_theta"], **shape, "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(dict(sorted(shape.items())), indent=2) + "\n")
    generation = {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        # The first ends an answer, the second a text without the chat template.
        "eos_token_id": [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "do_sample": False,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    size = sum(value.numel() for value in weights.values())
    print(f"{size / 1e6:.2f}M parameters after {state['seen'] / 1e6:.2f}M tokens -> {out}")


def main() -> None:
    """Export the newest checkpoint of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--state", type=Path, default=default_directory(), help="state directory of the run")
    parser.add_argument("--out", type=Path, default=ASSET, help="model directory; it must hold tokenizer.json")
    parser.add_argument("--compact", type=Path, help="write a small resumable state here instead of a model")
    args = parser.parse_args()
    if args.compact:
        compact(newest(args.state), args.compact)
    else:
        export(newest(args.state), args.out)


if __name__ == "__main__":
    main()
