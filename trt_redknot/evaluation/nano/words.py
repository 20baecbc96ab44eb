"""The words of the nano documents: every one is a token."""

from __future__ import annotations

from functools import cache

PAD, END = "<pad>", "<eos>"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Alva Amos Anja Aron Arvid Asta Axel Berit Birk Bodil Britta Cajsa Calle Dagny David Disa Ebba Edda Edvin
    Egil Eira Elias Elin Elof Embla Enok Erik Ester Evald Finn Folke Freja Frida Gerd Greta Gunnar Halvar Hanna
    Harald Hedda Helge Hilma Hugo Ida Inga Irma Isak Ivar Jonas Judit Julia Kajsa Karin Klara Knut Lars Lena
    Linus Lotta Lova Magda Malte Mara Maja Nils Nora Olga Olin Oskar Otto Paula Pera Petra Ragna Runa Sanna
    Sigge Signe Sixten Siv Sonja Sture Sven Svea Tage Tilda Tora Tove Tyra Ulla Vidar Viggo Vilma Yngve Yrsa
    Ylva
""")

THINGS = _words("""
    badge boat coat door drum flag gate glove hat horse house kite lamp letter mask oar pencil roof sail scarf
    sled table tent wagon
""")

LOOKS = _words("""
    amber ashen azure beige black blue brass bronze brown carved chalk cherry copper cream crimson dotted
    emerald faded gilded golden gray green indigo ivory jade lemon lilac linen maroon mossy navy ochre olive
    orange painted pearl pink plain purple red rusty sandy scarlet silver striped violet white yellow
""")

FIRMS = _words("""
    Alfix Aurio Borex Brano Cetus Cordia Delvo Dorex Ekvo Eltra Fenix Forma Glimax Hydra Isola Jupra Kelvo Lumo Marex
    Novita Optima Prisma Quanta Rondo Solex Tekno Ultra Vanto Wexio Xenon Ynor Zeta
""")

TOWNS = _words("""
    Almby Backa Brofors Dalby Ekeby Falla Fors Granby Hagby Holma Hultby Klinta Lerum Linnby Lunden Malmby
    Norrby Nyhem Oxelby Ramsta Ranby Sandby Sjoby Skogby Solna Stenby Sundby Torsby Valla Vikby Vreta Ytterby
""")

SEASONS = _words("""
    spring summer autumn winter
""")

DAYS = _words("""
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""")

WEATHER = _words("""
    calm cold cloudy dry foggy mild rainy snowy sunny warm wet windy
""")

SCENES = _words("""
    bridge field forest hill lake meadow path river road shore street valley
""")

GRAMMAR = _words("""
    Passage Question Answer Report About More about the same person What Who is now of employer town chief In The On It
    They was and quiet crossed before near . : , ?
""")

NUMBERS = tuple(str(number) for number in range(1, 257))


@cache
def vocabulary() -> tuple[str, ...]:
    """All tokens in the order of their ids; `<pad>` is 0 and `<eos>` is 1."""
    groups = (GRAMMAR, NAMES, THINGS, LOOKS, FIRMS, TOWNS, SEASONS, DAYS, WEATHER, SCENES, NUMBERS)
    return tuple(dict.fromkeys([PAD, END, *(word for group in groups for word in group)]))


@cache
def token_ids() -> dict[str, int]:
    """Word to id."""
    return {word: index for index, word in enumerate(vocabulary())}


def join_words(words: list[str]) -> str:
    """Readable text: no space before punctuation. The tokenizer splits it into the same words again."""
    text = ""
    for word in words:
        text += word if not text or word in (".", ",", "?", ":", ";") else f" {word}"
    return text
