"""The operations of `kernels.base` in Triton, for CUDA devices.

`support` says where they can be used, and imports nothing; `ops` and `attention` launch them; what Triton compiles is
in `device`. Only `ops.KERNELS` is asked for from outside, and only once a CUDA device is to be used: Triton takes long
to import and is absent from builds of torch for CPUs.

With TRITON_INTERPRET=1 in the environment before Triton is imported, everything here also takes tensors on the CPU:
Triton then interprets each kernel, slowly, which is how it is tested where there is no GPU.
"""
