"""Other engines, driven on the same checkpoint and tokens where they are installed."""

from bench.peers.llama_cpp_batch import LlamaCpp
from bench.peers.transformers_generate import TransformersGenerate

PEERS = {"transformers": TransformersGenerate, "llama.cpp": LlamaCpp}
