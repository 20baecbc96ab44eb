"""CUDA kernels through torch.library: functions with the names and signatures of `ops/reference`. Importing loads nothing."""
