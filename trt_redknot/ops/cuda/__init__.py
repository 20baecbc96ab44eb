"""CUDA kernels through torch.library, named and called as `ops/reference` is. Importing loads nothing."""
