"""The page of a pre-training run, made from what the run left in its folder."""

import json
from pathlib import Path
from typing import Any

from bertsmith.report.pretraining import FilledMask, PretrainingReport, pretraining_page


def write_report(
    run: Path,
    page: Path,
    *,
    title: str,
    filled: tuple[FilledMask, ...] = (),
    attention: str | None = None,
    commands: tuple[str, ...] = (),
) -> None:
    """Writes the page of a finished run (its log.jsonl, result.json, recipe.toml and config.json)."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = json.loads((run / "result.json").read_text(encoding="utf-8"))
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))["model"]
    term = figures["token_term"]
    report = PretrainingReport(
        title=title,
        facts=_facts(config, figures),
        steps=[_named(row, term) for row in rows if row["kind"] == "training"],
        held_out=[_named(row, term) for row in rows if row["kind"] == "held_out"],
        unigram_entropy=figures.get("unigram_level"),
        filled=filled,
        attention=attention,
        settings=(run / "recipe.toml").read_text(encoding="utf-8"),
        commands=commands,
        notices=tuple(row["text"] for row in rows if row["kind"] == "notice"),
        guessed=_guessed(term),
    )
    page.write_text(pretraining_page(report), encoding="utf-8")


def _named(row: dict[str, Any], term: str) -> dict[str, Any]:
    """A log row under the page's names: its loss is that of guessed tokens, which the unigram level compares with."""
    return {**row, "loss": row[f"{term}_loss"], "masked_accuracy": row[f"{term}_accuracy"]}


def _guessed(term: str) -> str:
    """What the tokens of a term are called on the page."""
    return "next tokens" if term == "next_token" else "masked tokens"


def _facts(config: dict[str, Any], figures: dict[str, Any]) -> dict[str, str]:
    """The run in a few lines."""
    encoder = config["encoder"]
    facts = {
        "network": f"{config['family']}, {len(encoder['layers'])} layers of width {encoder['width']}",
        "parameters": f"{figures['parameters']:,}",
        **_generator_facts(config, figures),
        "vocabulary": f"{encoder['vocabulary']:,}",
        "tokens seen": f"{figures['tokens']:,}",
        "time": f"{figures['seconds']:,.0f} s",
        "speed": f"{figures['tokens_per_second']:,.0f} tokens/s",
    }
    held_out = figures.get("held_out")
    if held_out:
        term = figures["token_term"]
        facts["held-out loss"] = f"{held_out[f'{term}_loss']:.3f}"
        facts["unigram level"] = f"{figures['unigram_level']:.3f}"
        facts[f"{_guessed(term)} guessed"] = f"{held_out[f'{term}_accuracy']:.1%}"
        if "next_sentence_accuracy" in held_out:
            facts["next sentences told apart"] = f"{held_out['next_sentence_accuracy']:.1%}"
        if "replaced_recall" in held_out:
            facts["tokens replaced"] = f"{held_out['replaced_share']:.1%}"
            facts["replaced tokens found"] = f"{held_out['replaced_recall']:.1%}"
            facts["finds that are right"] = f"{held_out['replaced_precision']:.1%}"
    return facts


def _generator_facts(config: dict[str, Any], figures: dict[str, Any]) -> dict[str, str]:
    """The generator in two lines, if there is one."""
    if config.get("generator") is None:
        return {}
    encoder, sharing = config["generator"]["model"]["encoder"], config["generator"]["sharing"].replace("_", "-")
    shape = f"{len(encoder['layers'])} layers of width {encoder['width']}, embedding sharing: {sharing}"
    return {"generator": shape, "parameters, generator": f"{figures['generator_parameters']:,}"}
