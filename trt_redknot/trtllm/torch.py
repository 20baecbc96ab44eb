"""Importing this module registers the kernels as `torch.ops.redknot`: the way into TensorRT-LLM's PyTorch backend.

Raises EngineError where the libraries were not built (`make plugins`), or this torch cannot load them. A GPU is needed
only to call an op; TensorRT-LLM itself is not needed.
"""

from trt_redknot.ops.cuda.library import load_kernels

load_kernels()
