"""Safetensors checkpoints with quantized weights. Each format has a module; `formats` is the table of them.

A format reads its settings in config.json and describes each quantized matrix by the headers of its tensors; `expand`
computes the numbers.
"""
