"""The package's version, once: packaging, manifests and `python -m trt_redknot version` read it here."""

VERSION = "0.1.0"
