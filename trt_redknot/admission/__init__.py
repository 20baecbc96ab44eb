"""Admission of artifacts into a request: unanimous, or a fallback of all ranks with one reason."""

from trt_redknot.admission.admit import Admission, AdmittedDocument, admit
from trt_redknot.admission.reasons import FallbackReason

__all__ = ["Admission", "AdmittedDocument", "FallbackReason", "admit"]
