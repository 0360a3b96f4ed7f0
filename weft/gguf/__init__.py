"""The GGUF file format: its header, checked, and the types of its tensors. Knows neither models nor tokenizers."""
