"""Writes the nano example's data: records in LongBench's format, documents, the tokenizer, the configuration.

Run `python examples/nano/make_data.py --output examples/nano`. Same options, same bytes; the files it wrote are part of
the repository. `run/train_nano.py` draws its training data from the same generator, with other seeds.
"""

from __future__ import annotations

from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.evaluation.frozen import LONGER, SHORT, freeze
from trt_redknot.evaluation.nano.network import NanoSizes, nano_config, write_tokenizer
from trt_redknot.evaluation.nano.prompts import write_documents, write_records
from trt_redknot.evaluation.nano.world import SHORT_KINDS

LENGTHS = (256, 1024, 2048, 4096)
SEED = 20261130
# Tokens of the documents that the demo asks about.
DOCUMENTS = 1200


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@click.option("--seed", type=click.IntRange(0), default=SEED, show_default=True, help="Same seed, same bytes.")
@click.option("--length", "lengths", type=click.IntRange(256), multiple=True, default=LENGTHS, show_default=True,
              help="Tokens of a prompt; may be repeated.")  # fmt: skip
@click.option("--short", type=click.IntRange(0), default=SHORT, show_default=True, help="Short answers a file.")
@click.option("--longer", type=click.IntRange(0), default=LONGER, show_default=True, help="Longer answers a file.")
@click.option("--files", type=click.IntRange(1), default=1, show_default=True,
              help="Files a length with so many records each, to measure side by side.")  # fmt: skip
@click.option("--kind", "kinds", type=click.Choice(SHORT_KINDS), multiple=True, default=SHORT_KINDS,
              help="Kinds of questions with short answers, in turn. Left out: all.")  # fmt: skip
def main(
    output: Path, seed: int, lengths: tuple[int, ...], short: int, longer: int, files: int, kinds: tuple[str, ...]
) -> None:
    """Write records with their manifest, documents, tokenizer and configuration of the nano example."""
    records = output / "records"
    written = write_records(records, lengths, seed=seed, short=short, longer=longer, files=files, short_kinds=kinds)
    frozen = freeze(records, "nano", written, short=short, longer=longer)
    write_documents(output / "documents", output / "questions.json", DOCUMENTS, seed=seed)
    write_tokenizer(output / "tokenizer")
    nano_config(NanoSizes()).save_pretrained(output)
    click.echo(f"{records}: {len(written)} files, digest {frozen.digest}")


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
