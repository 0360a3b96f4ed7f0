"""Other engines, driven on the same checkpoint and tokens where they are installed."""

from bench.peers.transformers_generate import TransformersGenerate

PEERS = {"transformers": TransformersGenerate}
