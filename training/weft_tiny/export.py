"""Writing a checkpoint as the package's model directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.weft_tiny.tokenizer import END_OF_TEXT, IM_END, write
from training.weft_tiny.train import ASSET, make_config


def export(checkpoint: Path, out: Path) -> None:
    """Write the averaged weights in bfloat16 with the configuration files."""
    state = torch.load(checkpoint, map_location="cpu")
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
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "do_sample": False,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    size = sum(value.numel() for value in weights.values())
    print(f"{size / 1e6:.2f}M parameters after {state['seen'] / 1e6:.2f}M tokens -> {out}")


def main() -> None:
    """Export the last checkpoint of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/weft_tiny/checkpoint.pt"))
    parser.add_argument("--out", type=Path, default=ASSET)
    args = parser.parse_args()
    export(args.checkpoint, args.out)


if __name__ == "__main__":
    main()
