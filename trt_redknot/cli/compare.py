"""The command behind `run/compare.py`: one question about documents, answered in both arms, as a table and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from trt_redknot.cli.documents import find_documents, read_document
from trt_redknot.cli.engine_options import DEVICE_OPTION, ENGINE_OPTION
from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.cli.output import Output
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError
from trt_redknot.request.request import Artifact, Request, Tokens

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from trt_redknot.engine.response import Response
    from trt_redknot.engine.tokenizer import EngineTokenizer
    from trt_redknot.reports.page import ArmText


def compare_command(comm: Intracomm | None) -> click.Command:
    """The click command of one rank."""

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog="""\b
Example:
  mpirun -n 2 python -m mpi4py run/compare.py --engine engine --store store --question "Which limit holds?" documents/
""",
    )
    @click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
    @ENGINE_OPTION
    @DEVICE_OPTION
    @click.option("--store", "store_dir", type=click.Path(path_type=Path), required=True, help="Artifact store.")
    @click.option("--namespace", default="default", show_default=True, help="Tenant of the store.")
    @click.option("--question", required=True, help="What is asked after the documents.")
    @click.option("--budget", type=FiniteRange(0, 1), default=0.10, show_default=True)
    @click.option(
        "--boundary", type=click.IntRange(0),
        help="Rows at both ends of a document that are recomputed in full. Left out: the coarsest compression window.",
    )  # fmt: skip
    @click.option("--tau", type=FiniteRange(0, 1, min_open=True), help="Adaptive fanout threshold.")
    @click.option("--epilogue", type=click.Choice(["full", "active"]), default="full", show_default=True)
    @click.option("--max-new-tokens", type=click.IntRange(1), default=16, show_default=True)
    @click.option(
        "--warm-up/--no-warm-up", default=True, show_default=True, help="Run both arms once before they are timed."
    )
    @click.option("--page", type=click.Path(path_type=Path), help="Write the row map and ledgers to this HTML file.")
    def command(
        paths: tuple[Path, ...], engine_dir: Path, device: str | None, store_dir: Path, namespace: str, question: str,
        budget: float, boundary: int | None, tau: float | None, epilogue: str, max_new_tokens: int, warm_up: bool,
        page: Path | None,
    ) -> None:  # fmt: skip
        """Ask one question about documents with reuse and without, and show what was saved and what it changed."""
        from trt_redknot.artifacts.store import ArtifactStore
        from trt_redknot.engine.engine import Engine
        from trt_redknot.engine.tokenizer import EngineTokenizer
        from trt_redknot.reports.page import PageInput, render_page, write_page
        from trt_redknot.reports.tables import arms_table

        if not question.strip():
            raise RequestError("the question is empty", expected="some text", remedy="Give --question a question.")
        engine = Engine.open(engine_dir, comm, device=device)
        out = Output(engine.collectives.rank)
        tokenizer = EngineTokenizer(engine_dir)
        store = ArtifactStore(store_dir, namespace=namespace)
        documents = [read_document(path, tokenizer.encode) for path in find_documents(paths)]
        policy = ReusePolicy(
            budget=budget, boundary=boundary, tau=tau, epilogue=cast('Literal["full", "active"]', epilogue)
        )
        segments: list[Artifact | Tokens] = [
            Artifact(store.artifact_id(document.tokens, engine.identity), tokens=document.tokens)
            for document in documents
        ]
        segments.append(Tokens(tokenizer.encode(question)))
        if warm_up:
            # First use pays for pages of the store and for the allocator's growth, whichever arm comes first.
            for chosen in (policy, None):
                engine.generate(Request(segments=segments, max_new_tokens=1, reuse=chosen), store=store)
        reuse, recompute = (
            engine.generate(Request(segments=segments, max_new_tokens=max_new_tokens, reuse=chosen), store=store)
            for chosen in (policy, None)
        )
        texts = tuple(_arm_text(tokenizer, response) for response in (reuse, recompute))
        out.show(arms_table([reuse, recompute], [text.text for text in texts]))
        if page is not None and engine.collectives.rank == 0:
            html = render_page(
                PageInput(
                    reuse=reuse, recompute=recompute, geometry=engine.geometry, profile=engine.manifest.profile,
                    policy=policy, network=engine_dir.name, tp_size=engine.collectives.size,
                    names=[document.path.stem for document in documents] + ["question"] if reuse.report.admitted else
                    None, question=question, texts=(texts[0], texts[1]),
                )
            )  # fmt: skip
            write_page(page, html)
            out.note(f"page: {page}")

    return command


def _arm_text(tokenizer: EngineTokenizer, response: Response) -> ArmText:
    from trt_redknot.reports.page import ArmText

    return ArmText(text=tokenizer.decode(response.tokens), pieces=[tokenizer.decode([id_]) for id_ in response.tokens])
