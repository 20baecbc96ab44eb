"""From what a client sent to a job: texts become tokens, documents get their artifacts' ids, nonsense is refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trt_redknot.artifacts.identity import artifact_id_of
from trt_redknot.digests import digest_tokens
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.pool import PoolRows
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import EngineError, RequestError, TooLongError
from trt_redknot.request.file import RequestFile, SegmentFile, make_request
from trt_redknot.request.layout import check_request, check_token_ids
from trt_redknot.serving.config import Missing, ServingConfig
from trt_redknot.serving.jobs import Job, Times
from trt_redknot.serving.messages import BuildRequest, ServingError, ServingFault, ServingRequest
from trt_redknot.serving.stream import Stream
from trt_redknot.serving.text import AnswerText


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Makes jobs. Calls may come from several threads.

    Attributes:
        tokenizer: None for an engine without one.
        capacity: of the cache pool.
    """

    engine: Engine
    config: ServingConfig
    tokenizer: EngineTokenizer | None
    capacity: PoolRows

    def job(
        self,
        message: ServingRequest | BuildRequest,
        number: int,
        now: float,
        on_cancel: Callable[[Job], None],
    ) -> Job:
        """A job that waits.

        Args:
            now: monotonic seconds.

        Raises:
            ServingError: `invalid_request` or `too_large`, with what is wrong.
        """
        try:
            self._check_texts(message)
            request = self._request(message) if isinstance(message, ServingRequest) else None
            documents = self._documents(message, request)
            tokens = self._check(request, documents)
        except TooLongError as error:
            raise ServingError(ServingFault.TOO_LARGE, str(error)) from error
        except (RequestError, EngineError) as error:
            raise ServingError(ServingFault.INVALID_REQUEST, str(error)) from error
        deadline_s = message.deadline_s or self.config.default_deadline_s
        stops = message.stop if isinstance(message, ServingRequest) else []
        request_id = message.request_id or uuid.uuid4().hex
        job = Job(
            number=number,
            request_id=request_id,
            tenant=message.tenant or self.config.namespace,
            stream=Stream(request_id, lambda: on_cancel(job)),
            request=None if request is None else request.model_copy(update={"request_id": request_id}),
            documents=documents,
            rebuild=isinstance(message, BuildRequest) and message.rebuild,
            missing=self._missing(message),
            deadline=None if deadline_s is None else now + deadline_s,
            text=AnswerText(None if self.tokenizer is None else self.tokenizer.decode, stops),
            times=Times(submitted=now),
            cost=tokens,
        )
        return job

    def _check_texts(self, message: ServingRequest | BuildRequest) -> None:
        """Raise TooLongError for texts that are too long whatever their tokens are. Nothing is tokenised."""
        if isinstance(message, BuildRequest):
            for place, document in enumerate(message.documents):
                self._check_bytes([document.text], f"the text of document {place}")
            return
        question = message.question if isinstance(message.question, str) else None
        texts = [*(segment.text for segment in [*message.segments, *message.documents]), question]
        self._check_bytes(texts, "the request's text")

    def _check_bytes(self, texts: Sequence[str | None], what: str) -> None:
        if self.tokenizer is None:
            return
        length = self.engine.manifest.max_length
        limit = length * self.tokenizer.longest_token_bytes
        found = sum(len(text.encode(errors="surrogatepass")) for text in texts if text is not None)
        if found > limit:
            raise TooLongError(
                f"{what} is too long for a request of {length} tokens", expected=f"at most {limit} bytes of UTF-8",
                found=found, remedy="Shorten it.",
            )  # fmt: skip

    def _missing(self, message: ServingRequest | BuildRequest) -> Missing:
        return (message.missing if isinstance(message, ServingRequest) else None) or self.config.missing

    def _request(self, message: ServingRequest) -> RequestFile:
        """The same request with segments, and with tokens for all texts."""
        if message.stop and self.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer, so an answer has no text to stop at", remedy="Use stop_tokens."
            )
        tenant = message.tenant or self.config.namespace
        if message.segments:
            segments = [self._segment(segment) for segment in message.segments]
        else:
            segments = [self._document(document, tenant) for document in message.documents]
            if isinstance(message.question, str):
                segments.append(SegmentFile(tokens=self._encode(message.question)))
            elif message.question is not None:
                segments.append(SegmentFile(tokens=message.question))
        return RequestFile(
            segments=segments,
            max_new_tokens=message.max_new_tokens,
            reuse=message.reuse,
            sampling=message.sampling,
            stop_tokens=message.stop_tokens,
        )

    def _segment(self, segment: SegmentFile) -> SegmentFile:
        return segment if segment.text is None else SegmentFile(tokens=self._encode(segment.text))

    def _document(self, document: SegmentFile, tenant: str) -> SegmentFile:
        """With the id its artifact has or would have."""
        if document.artifact is not None:
            return document
        tokens = document.tokens if document.text is None else self._encode(document.text)
        assert tokens is not None
        ids = check_token_ids(tokens, self.engine.geometry.vocab, "a document")
        if not len(ids):
            raise RequestError("a document is empty", expected="at least one token", remedy="Leave it out.")
        artifact_id = artifact_id_of(tenant, digest_tokens(ids), self.engine.identity)
        return SegmentFile(artifact=artifact_id, tokens=tokens)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer", expected="token ids", found="text",
                remedy="Give token ids, or build the engine from a checkpoint that has a tokenizer.json.",
            )  # fmt: skip
        return self.tokenizer.encode(text)

    def _documents(self, message: ServingRequest | BuildRequest, request: RequestFile | None) -> list[tuple[int, ...]]:
        """Token ids of what is to be built."""
        if isinstance(message, BuildRequest):
            return [tuple(self._segment(document).tokens or ()) for document in message.documents]
        if request is None or request.reuse is None or self._missing(message) != "build":
            return []
        known = [tuple(each.tokens) for each in request.segments if each.artifact is not None and each.tokens]
        return list(dict.fromkeys(known))

    def _check(self, request: RequestFile | None, documents: list[tuple[int, ...]]) -> int:
        """Tokens that will run, as far as they are known. Raises RequestError."""
        engine, geometry = self.engine, self.engine.geometry
        for place, document in enumerate(documents):
            engine.check_document(document, f"document {place}")
            self._check_size(PoolRows.of_sequence(geometry, len(document), 1), f"document {place}")
        total = sum(len(document) for document in documents)
        if request is None:
            return total
        check_request(make_request(request), geometry)
        for place, segment in enumerate(request.segments):
            if segment.artifact is not None and segment.tokens is not None:
                engine.check_document(segment.tokens, f"the document of segment {place}")
        prompt = sum(len(segment.tokens or ()) for segment in request.segments)
        length, limit = prompt + request.max_new_tokens, engine.manifest.max_length
        if length > limit:
            raise TooLongError(
                "the request is too long", expected=f"at most {limit} tokens, prompt and answer together",
                found=f"{prompt} + {request.max_new_tokens}", remedy="Shorten it.",
            )  # fmt: skip
        self._check_size(PoolRows.of_sequence(geometry, length, len(request.segments)), "the request")
        return total + length

    def _check_size(self, size: PoolRows, what: str) -> None:
        if not size.within(self.capacity):
            raise TooLongError(
                f"{what} does not fit into the service's cache", expected=f"at most {self.capacity}", found=size,
                remedy="Shorten it, or serve with more cache_tokens.",
            )  # fmt: skip
