"""A request becomes a plan: segments, row classes, the controller. Pure data, no device, no rank."""

from trt_redknot.request.request import Artifact, Request, Sampling, Tokens

__all__ = ["Artifact", "Request", "Sampling", "Tokens"]
