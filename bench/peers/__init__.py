"""Other engines, driven on the same checkpoint and tokens where they are installed."""

from bench.peers.llama_cpp_batch import LlamaCpp
from bench.peers.openvino_genai import OpenVino
from bench.peers.transformers_generate import TransformersGenerate

PEERS = {"transformers": TransformersGenerate, "llama.cpp": LlamaCpp, "openvino": OpenVino}
PACKAGES = {
    "transformers": "transformers",
    "llama.cpp": "llama-cpp-python gguf",
    "openvino": "openvino-genai gguf",
}
"""Peer -> what pip would have to install for it."""
