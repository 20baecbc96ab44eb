"""Trains the tokenizer of the examples: byte-level BPE, 4096 tokens, from texts that lie on every machine.

Run `python examples/tokenizer/train.py --output examples/tokenizer`. The texts are the example documents and the topics
of Python's own help (`pydoc_data`, PSF licence). The result depends on the Python release, so the files that it wrote
with Python 3.11 are part of the repository.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
LONGEST = 1 << 20
BOS, EOS = "<bos>", "<eos>"
DOCUMENTS = Path(__file__).resolve().parent.parent / "documents"
# The documents are few against the topics; repeating them makes their words, which the demo uses, whole tokens.
DOCUMENT_WEIGHT = 8


def train(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `VOCABULARY` tokens; `<bos>` is 0, `<eos>` is 1, neither is ever added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"error: the texts give {tokenizer.get_vocab_size()} tokens, expected {VOCABULARY}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json"
    )
    output: Path = parser.parse_args().output
    documents = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.txt"))]
    tokenizer = train(documents * DOCUMENT_WEIGHT + [topics[name] for name in sorted(topics)])
    tokenizer.save_pretrained(str(output))
    # The name that every release of transformers loads, not only the one that wrote it.
    config_path = output / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sizes = ", ".join(str(len(tokenizer.encode(text))) for text in documents)
    print(f"{len(tokenizer)} tokens; the documents have {sizes} tokens")


if __name__ == "__main__":
    main()
