"""The command behind `run/generate.py`: one request file, one answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_redknot.cli.engine_options import DEVICE_OPTION, ENGINE_OPTION
from trt_redknot.cli.output import Output
from trt_redknot.cli.store_options import METRICS_OPTION, watched_store
from trt_redknot.errors import EngineError, RequestError
from trt_redknot.observability.logs import json_log
from trt_redknot.request.file import read_request
from trt_redknot.textfile import replace_text

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from trt_redknot.engine.response import Response


def generate_command(comm: Intracomm | None) -> click.Command:
    """The click command of one rank."""

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog="""\b
Examples:
  python run/generate.py --engine engine --store store --request question.json
  mpirun -n 2 python -m mpi4py run/generate.py --engine engine --store store --request question.json --arm recompute
The format of a request file is in docs/requests.md.
""",
    )
    @ENGINE_OPTION
    @DEVICE_OPTION
    @click.option("--store", "store_dir", type=click.Path(path_type=Path), required=True, help="Artifact store.")
    @click.option("--namespace", default="default", show_default=True, help="Tenant of the store.")
    @click.option("--request", "request_file", type=click.Path(path_type=Path), required=True, help="Request file.")
    @click.option("--arm", type=click.Choice(["reuse", "recompute"]), help="Override the request's reuse policy.")
    @click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the response to this file.")
    @METRICS_OPTION
    @click.option(
        "--log", "log_file", type=click.Path(), help="Append what happens to this file as JSON lines; - is stderr."
    )
    def command(
        engine_dir: Path, device: str | None, store_dir: Path, namespace: str, request_file: Path, arm: str | None,
        json_file: Path | None, metrics_file: Path | None, log_file: str | None,
    ) -> None:  # fmt: skip
        """Answer the request in a JSON file and show what was reused."""
        from trt_redknot.engine.engine import Engine
        from trt_redknot.engine.tokenizer import EngineTokenizer
        from trt_redknot.reports.tables import arms_table

        engine = Engine.open(engine_dir, comm, device=device)
        rank = engine.collectives.rank
        out = Output(rank)
        request = read_request(request_file, lambda: EngineTokenizer(engine_dir).encode)
        if arm == "recompute":
            request = dataclasses.replace(request, reuse=None)
        elif arm == "reuse" and request.reuse is None:
            raise RequestError(
                "the request has no reuse policy", path=request_file, remedy='Give it one, or leave "reuse" out of it.'
            )
        with contextlib.ExitStack() as around:
            if log_file is not None:
                around.enter_context(json_log(log_file, rank=rank))
            store = around.enter_context(watched_store(store_dir, namespace, metrics_file, rank=rank))
            response = engine.generate(request, store=store)
        text = _text(engine_dir, response)
        # Shown first: an answer that cannot be written is not lost.
        out.show(arms_table([response]))
        if text is not None:
            out.show(text)
        if json_file is not None and rank == 0:
            _write(json_file, {**response.to_json(), "text": text})

    return command


def _text(engine_dir: Path, response: Response) -> str | None:
    from trt_redknot.engine.tokenizer import EngineTokenizer

    try:
        return EngineTokenizer(engine_dir).decode(response.tokens)
    except EngineError:
        # An engine without a tokenizer answers in token ids.
        return None


def _write(path: Path, value: object) -> None:
    try:
        replace_text(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise RequestError(
            f"the response cannot be written: {error.strerror or error}", path=path,
            remedy="Name a file in a folder that you may write to.",
        ) from error  # fmt: skip
