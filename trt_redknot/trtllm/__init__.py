"""Working beside TensorRT-LLM, which stays optional: nothing here imports it before it is needed.

* :mod:`trt_redknot.trtllm.mapping`: a `tensorrt_llm.Mapping` says which rank an engine is opened as.
* :mod:`trt_redknot.trtllm.network`: our ops in a network of TensorRT-LLM 1.2 (the last release with networks).
* `import trt_redknot.trtllm.torch` registers the kernels as `torch.ops.redknot`, for its PyTorch backend.
"""
