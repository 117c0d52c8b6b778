"""Tables of the documentation, generated from the code: `python docs/hooks/tables.py recipes` or `finetuning`."""

import sys
from collections.abc import Sequence
from typing import Any

from bertsmith.models.published import preset
from bertsmith.recipes import TIERS, find, recipe
from bertsmith.recipes.finetune import finetune_recipe, size_of
from bertsmith.recipes.parts import Table

_COLUMNS = ("recipe", "objective", "masked", "length", "tokens a step", "steps", "peak rate", "schedule", "from")


def recipe_tables() -> str:
    """Return one Markdown table for each tier; recipes with equal cells share a row."""
    return "\n".join(f"### {tier}\n\n{_table(tier)}\n" for tier in TIERS).rstrip() + "\n"


def _table(tier: str) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for size in TIERS[tier]:
        name = f"{size}:{tier}"
        rows.setdefault((*_cells(recipe(name)), find(name)[1].source), []).append(size)
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "\n".join([*lines, *(_line([", ".join(sizes), *cells]) for cells, sizes in rows.items())])


def _cells(plain: dict[str, Any]) -> list[str]:
    objective, batch, schedule, run = (plain[name] for name in ("objective", "batch", "schedule", "run"))
    terms = {"masked_lm": "masked tokens", "replaced_tokens": "replaced tokens"}[objective["kind"]]
    masking = objective["masking"]
    ramp = f"{batch['ramp_from']:,} → " if "ramp_from" in batch else ""
    return [
        terms + (" + next sentence" if objective.get("next_sentence") else ""),
        f"{masking['rate']:.0%}" + (" in n-grams" if masking.get("unit") == "ngram" else ""),
        ", then ".join(str(part["length"]) for part in (plain["sequences"], *plain.get("phases", ()))),
        f"{ramp}{batch['tokens']:,}",
        f"{run['steps']:,}",
        f"{plain['optimizer']['learning_rate']:g}",
        f"{schedule['kind']}, {round(schedule['warmup'] * run['steps']):,} warm-up",
    ]


_SIZES = {
    "BERT and families without a paper": (
        "bert-tiny",
        "bert-mini",
        "bert-small",
        "bert-medium",
        "bert-base",
        "bert-large",
    ),
    "ELECTRA, ConvBERT": ("electra-small", "convbert-medium-small", "electra-base", "electra-large"),
    "disentangled": ("disentangled-small",),
    "DeBERTa": ("deberta-base", "deberta-large", "deberta-v2-xxlarge"),
    "DeBERTa v3": ("deberta-v3-small", "deberta-v3-base", "deberta-v3-large"),
    "modern": ("modern-small", "modern-base", "modern-large"),
}
_TASKS = {
    "mnli": "classification",
    "sst-2": "classification",
    "qnli": "classification",
    "cola": "classification",
    "mrpc": "classification",
    "rte": "classification",
    "sts-b": "regression",
    "conll2003": "tagging",
    "squad-v1.1": "spans",
    "squad-v2.0": "spans",
    "swag": "choice",
}
_BASES = ("bert-base", "electra-base", "deberta-base", "deberta-v3-large", "modern-base")


def finetuning_tables() -> str:
    """Return two Markdown tables: defaults by family and size, and by task for some presets."""
    columns = ("family", "size", "such as", "peak rate", "layer decay", "head dropout", "rate of fresh weights")
    lines = [_line(columns), _line(["---"] * len(columns))]
    for family, names in _SIZES.items():
        for name in names:
            config = preset(name)
            usual, fresh = (
                finetune_recipe(config, "classification", is_fresh=is_fresh).settings for is_fresh in (False, True)
            )
            cells = [f"{usual['optimizer.learning_rate']:g}", f"{usual.get('encoder.layer_decay', 1):g}"]
            cells += [f"{usual['head.dropout']:g}" if "head.dropout" in usual else "the model's"]
            lines.append(_line([family, size_of(config), name, *cells, f"{fresh['optimizer.learning_rate']:g}"]))
    lines += ["", _line(["task", *_BASES]), _line(["---"] * (1 + len(_BASES)))]
    for task, kind in _TASKS.items():
        lines.append(_line([task, *(_short(finetune_recipe(preset(name), kind, task).settings) for name in _BASES)]))
    return "\n".join(lines) + "\n"


def _short(settings: Table) -> str:
    """Rate, batch, epochs, length."""
    names = ("optimizer.learning_rate", "batch.examples", "run.epochs", "sequences.length")
    return ", ".join(f"{settings[name]:g}" for name in names)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print({"recipes": recipe_tables, "finetuning": finetuning_tables}[sys.argv[1]](), end="")
