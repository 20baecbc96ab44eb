"""Triton's Python backend of trt_redknot: hands tensors to trt_redknot.serving and back. There is no logic here."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from trt_redknot.errors import RedKnotError
from trt_redknot.serving.triton import TritonFrontEnd


class TritonPythonModel:
    """The names and the life of this class are Triton's."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._front_end = TritonFrontEnd.open(args, pb_utils)
        except RedKnotError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[object]) -> None:
        for request in requests:
            self._front_end.answer(request)

    def is_ready(self) -> bool:
        """Asked by servers that know this method; the others need a probe that sends a request."""
        return self._front_end.is_ready()

    def finalize(self) -> None:
        self._front_end.close()
