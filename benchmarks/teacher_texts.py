"""Texts on which the bundled model learns the vectors of all-MiniLM-L6-v2.

    python benchmarks/teacher_texts.py DATA --out texts.jsonl.xz --pieces 3

DATA has the folders squad/v1.1, squad/v2.0, squad/shifts, boolq, commonsenseqa, hellaswag, pairs/snli and
corpus/wikipedia-en with .jsonl.xz files; only their training splits are read. Writes distinct lower-cased texts of at
most 40 words, each with its kind: sentences, questions and titles of the data, and texts made from them, which teach
the meaning of words that are rare in an encyclopedia: single words, phrases of 2 to 6 words, everyday sentences in
which one word is replaced by another, and short requests. A request is a phrase such as "open a bank account" or a noun
in a frame such as "how do i …"; phrases about buying, paying and accounts are preferred, since customers write such
requests. A teacher has a vector for any of these texts. Texts of the dev splits of DATA/glue and of the demo are left
out.

With --pieces, several files of about the same mix are written: texts-0.jsonl.xz and so on.
"""

import argparse
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bertsmith.text.support_desk import support_desk

SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z"“])')
WIKIHOW_MARK = re.compile(r"\[(?:header|title|step|substeps)\]")
WORD = re.compile(r"[a-z]{3,}")
SPEAKER = re.compile(r"\b(?:I|me|my|you|your|please)\b")
PURPOSE = re.compile(
    r"\bto ((?!be\b|have\b|the\b)[a-z]+ (?:(?:a|an|the|his|her|their|your|my|it|for|with)\b[a-z ]{2,40}))"
)
NOUN = re.compile(r"\b(?:his|her|their|your|my) ([a-z]{3,}(?: [a-z]{4,})?)\b")
OWNER = re.compile(r"\b(?:his|her|their|your|its)\b")
TRADE_WORDS = """
account accounts address app bank bill booking buy cancel card cash charge charged cheque code complaint confirm
contact coupon credit customer deliver delivered delivery deposit device discount download email exchange fee flight
gift hotel insurance internet invoice item laptop loan login luggage membership message money offer online order
ordered package parcel password pay payment payments phone price product profile purchase receipt refund register
registration renew rent repair replace reservation reserve return screen sell send seller service ship shipping shop
sign size store subscribe subscription support ticket tickets track transfer update upgrade user voucher warranty
website withdraw
"""
TRADE = frozenset(TRADE_WORDS.split())
ACTIONS = (
    "how do i {}?", "how can i {}?", "how long does it take to {}?", "how much does it cost to {}?",
    "where can i {}?", "when can i {}?", "why can't i {}?", "can i {}?", "can you {}?", "could you please {}?",
    "do i have to {}?", "do you know how to {}?", "is it possible to {}?", "is there a way to {}?",
    "what do i need to {}?", "am i allowed to {}?", "i want to {}", "i would like to {}", "i need to {}",
    "i have to {} today", "i am trying to {}", "i tried to {} but it did not work", "i forgot to {}",
    "i do not know how to {}", "i was told to {}", "i no longer want to {}", "i am unable to {}", "please {}",
    "please help me {}", "{}", "{} for me", "who can {}?",
)  # fmt: skip
THINGS = (
    "my {} is broken", "my {} does not work", "my {} is missing", "my {} is late", "my {} has not come yet",
    "where is my {}?", "where can i find my {}?", "i lost my {}", "i can't find my {}", "someone stole my {}",
    "the {} is wrong", "the {} is too expensive", "there is a problem with my {}", "there are two {}s instead of one",
    "how much is the {}?", "how does the {} work?", "what is the {} for?", "who has my {}?", "do you sell a {}?",
    "is the {} free?", "is my {} safe?", "can i change my {}?", "can i keep the {}?", "can i have another {}?",
    "i want a new {}", "i do not need the {} any more", "i have a question about my {}", "i am not happy with the {}",
    "i love my {}", "thanks for the {}", "tell me about the {}", "the {} you sent me is the wrong one",
    "why was my {} refused?", "when will i get my {}?", "check my {}", "remove my {}", "{}",
)  # fmt: skip


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def train_rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*train*.jsonl.xz")):
        yield from rows(path)


def cleaned(texts: Iterable[str], least: int = 3) -> list[str]:
    """Return distinct texts of `least` to 40 words."""
    spaced = (" ".join(text.split()) for text in texts)
    return list(dict.fromkeys(text for text in spaced if least <= len(text.split()) <= 40 and len(text) < 300))


def squad_questions(data: Path) -> list[str]:
    return [row["question"] for part in ("v1.1", "v2.0", "shifts") for row in train_rows(data / "squad" / part)]


def squad_sentences(data: Path) -> list[str]:
    parts = ("shifts", "v1.1")
    contexts = dict.fromkeys(row["context"] for part in parts for row in train_rows(data / "squad" / part))
    return [sentence for context in contexts for sentence in SENTENCE_END.split(context)]


def hellaswag_sentences(data: Path) -> list[str]:
    """Return the sentences of all contexts and endings, which may be steps of instructions (wikiHow)."""
    sentences = []
    for row in train_rows(data / "hellaswag"):
        context = row["context"].split(": ", 1)[-1]  # without the name of the activity
        for text in (context, *row["choices"]):
            sentences += [sentence for step in WIKIHOW_MARK.split(text) for sentence in SENTENCE_END.split(step)]
    return sentences


def wikipedia_sentences(data: Path) -> Iterator[str]:
    """Yield random sentences of every article (fewer of the later, shorter ones), all with I or you, and titles."""
    for number, path in enumerate(sorted((data / "corpus" / "wikipedia-en").glob("train-*.jsonl.xz"))):
        count = 18 if number < 6 else 8
        for row in rows(path):
            split = (sentence for line in row["text"].split("\n") for sentence in SENTENCE_END.split(line))
            whole = [sentence for sentence in split if len(sentence) > 25 and sentence[-1] in ".!?"]
            chosen = set(random.sample(range(len(whole)), min(len(whole), count)))
            yield from (
                text for index, text in enumerate(whole) if index in chosen or text[-1] == "?" or SPEAKER.search(text)
            )
            if random.random() < 0.5:
                yield row["title"]


def frequent_words(texts: Iterable[str], least: int) -> list[str]:
    """Return the lower-cased words that occur in at least `least` texts."""
    # a set has another order in every process
    counts = Counter(word for text in texts for word in dict.fromkeys(WORD.findall(text.lower())))
    return [word for word, count in counts.items() if count >= least]


def phrases(texts: Sequence[str], count: int) -> list[str]:
    """Return runs of 2 to 6 words from random texts."""
    found = []
    for text in random.choices(texts, k=count):
        words, length = text.split(), random.randint(2, 6)
        start = random.randint(0, max(0, len(words) - length))
        found.append(" ".join(words[start : start + length]).strip(" .,;:"))
    return found


def substituted(texts: Sequence[str], words: Sequence[str], count: int) -> list[str]:
    """Return random texts in which one word of four or more letters is replaced by one of `words`."""
    found = []
    for text in random.choices(texts, k=count):
        split = text.split()
        places = [place for place, word in enumerate(split) if word.isalpha() and len(word) > 3]
        if places:
            split[random.choice(places)] = random.choice(words)
            found.append(" ".join(split))
    return found


def requests(texts: Sequence[str], count: int) -> list[str]:
    """Return `count` actions and things of the texts in random frames; half of them with a word of TRADE."""
    actions = cleaned(OWNER.sub("my", action) for text in texts for action in PURPOSE.findall(text))
    actions = [" ".join(action.split()[:7]) for action in actions]
    things = Counter(thing for text in texts for thing in NOUN.findall(text))
    nouns = [thing for thing, number in things.items() if number >= 2]
    found = []
    for kind, frames in ((actions, ACTIONS), (nouns, THINGS)):
        trade = [phrase for phrase in kind if not TRADE.isdisjoint(phrase.split())]
        for pool in (kind, trade):
            chosen = random.choices(pool, k=count // 4)
            found += [random.choice(frames).format(phrase) for phrase in chosen]
    return found


def held_back(data: Path) -> set[str]:
    """Return the texts that must not be learned: those of the demo and of the dev splits of GLUE, lower-cased."""
    texts = [row["text"] for split in ("train", "dev") for row in support_desk(split)]
    for path in (data / "glue").glob("*/dev.jsonl.xz"):
        texts += [value for row in rows(path) for value in row.values() if isinstance(value, str)]
    return {" ".join(text.lower().split()) for text in texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file, ending in .jsonl.xz")
    parser.add_argument("--pieces", type=int, default=1, help="number of files")
    parser.add_argument("--made", type=int, default=600_000, help="number of texts that are made from the others")
    arguments = parser.parse_args()
    data, made = arguments.data, arguments.made
    random.seed(0)
    kinds = {
        "squad questions": cleaned(squad_questions(data)),
        "boolq": cleaned(row["question"] + "?" for row in train_rows(data / "boolq")),
        "csqa": cleaned(row["question"] for row in train_rows(data / "commonsenseqa")),
        "hellaswag": cleaned(hellaswag_sentences(data)),
        "snli": cleaned(
            row[name] for row in train_rows(data / "pairs" / "snli") for name in ("sentence1", "sentence2")
        ),
    }
    everyday = [text for chosen in kinds.values() for text in chosen]
    kinds |= {
        "squad passages": cleaned(squad_sentences(data)),
        "wikipedia": cleaned(wikipedia_sentences(data), least=1),
    }
    sentences = [text for chosen in kinds.values() for text in chosen]
    common = frequent_words(everyday, least=3)
    kinds["words"] = [*common, *frequent_words(sentences, least=12)]
    kinds["phrases"] = sorted(phrases(everyday, made // 6) + phrases(sentences, made // 8))
    kinds["substituted"] = sorted(substituted(everyday, common, made // 4))
    kinds["requests"] = sorted(requests(sentences, made // 2))
    seen, counts = held_back(data), Counter[str]()
    opened = _files(arguments.out, arguments.pieces)
    with ExitStack() as stack:
        files = [stack.enter_context(lzma.open(path, "wt", encoding="utf-8", preset=9)) for path in opened]
        for kind, texts in kinds.items():
            for text in texts:
                lower = text.lower()
                if lower not in seen:
                    seen.add(lower)
                    # neighbours stay together, which compresses better
                    files[counts[kind] // 64 % len(files)].write(json.dumps({"kind": kind, "text": lower}) + "\n")
                    counts[kind] += 1
    print(json.dumps({"texts": counts.total(), **counts}))


def _files(out: Path, pieces: int) -> list[Path]:
    """Return the paths of the pieces of a file."""
    stem, dot, ending = out.name.partition(".")
    return [out] if pieces == 1 else [out.with_name(f"{stem}-{number}{dot}{ending}") for number in range(pieces)]


if __name__ == "__main__":
    main()
