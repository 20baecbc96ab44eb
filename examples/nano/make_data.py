"""Writes the nano example's data: record files in LongBench's format, their manifest, the tokenizer, the configuration.

Run `python examples/nano/make_data.py --output examples/nano`. Same seed, same bytes; the files it wrote are part of
the repository. `run/train_nano.py` draws its training data from the same generator, with other seeds.
"""

from __future__ import annotations

from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.evaluation.frozen import freeze
from trt_redknot.evaluation.nano.network import NanoSizes, nano_config, write_tokenizer
from trt_redknot.evaluation.nano.prompts import write_records

LENGTHS = (256, 1024, 2048, 4096)
SEED = 20261130


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@click.option("--seed", type=click.IntRange(0), default=SEED, show_default=True, help="Same seed, same bytes.")
def main(output: Path, seed: int) -> None:
    """Write records, manifest, tokenizer and configuration of the nano example."""
    records = output / "records"
    files = write_records(records, LENGTHS, seed=seed)
    frozen = freeze(records, "nano", files)
    write_tokenizer(output / "tokenizer")
    nano_config(NanoSizes()).save_pretrained(output)
    click.echo(f"{records}: {len(files)} files, digest {frozen.digest}")


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
