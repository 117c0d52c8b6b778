"""The recipes as a table for docs/recipes.md: `python -m bertsmith.recipes.overview` prints it."""

from typing import Any

from bertsmith.recipes import TIERS, find, recipe

_COLUMNS = ("recipe", "objective", "masked", "length", "tokens a step", "steps", "peak rate", "schedule", "from")


def overview() -> str:
    """One Markdown table for each tier, recipes that differ in nothing shown in one row."""
    return "\n".join(f"### {tier}\n\n{_table(tier)}\n" for tier in TIERS).rstrip() + "\n"


def _table(tier: str) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset in TIERS[tier]:
        name = f"{preset}:{tier}"
        rows.setdefault((*_cells(recipe(name)), find(name)[1].source), []).append(preset)
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "\n".join([*lines, *(_line([", ".join(presets), *cells]) for cells, presets in rows.items())])


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


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(overview(), end="")
