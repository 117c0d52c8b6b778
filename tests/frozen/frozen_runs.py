"""Frozen runs: hashes of the weights and results of seeded tiny jobs, to show that a refactoring changes no number.

    python tests/frozen/frozen_runs.py --save hashes.json       # before the change
    python tests/frozen/frozen_runs.py --compare hashes.json    # after it; exit code 1 and a list if anything differs

The hashes hold for one machine, one PyTorch version and one thread, so they are not committed: save and compare on the
same machine. Jobs use the command line and the public Python names only. `fix_measurements` is the one function that
names an internal module, and the block "models" is the one place that spells the settings of models.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch

import bertsmith
from bertsmith.cli import main as run_command


# ---- hook into an internal module: update the import when the code moves
def fix_measurements() -> None:
    """Replace the timing of artefacts in `bertsmith fit` by a formula: 1 ms, plus 1 ms per 10,000 stored numbers."""
    from bertsmith.shrinking.fit import measure

    def timing(folders: Sequence[Path], conditions: Any, runs: int, seconds: float) -> Any:
        found = []
        for folder in folders:
            p50 = 1 + stored_numbers(folder) / 10_000
            latency = {"p50": p50, "p95": 1.1 * p50, "mean": p50, "runs": float(runs)}
            found.append({workload.name: latency for workload in conditions.workloads})
        return measure.Timing(found, 300.0, stored_numbers(folders[0]) / 1000)

    measure.in_fresh_process = timing


# ---- models: every setting that chooses a network
TINY = {"width": 32, "layers": 3, "heads": 4, "max_length": 64, "dropout": 0.1, "init_std": 0.1}
BUCKETS = {"span": 16, "max_distance": 30}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # preset, overrides besides TINY
    "bert": ("bert-tiny", {}),
    "electra": ("electra-small", {"embedding_width": 16}),
    "convbert": ("convbert-small", {"embedding_width": 16}),
    "deberta": ("deberta-base", {"span": 16}),
    "deberta_v2": ("deberta-v2-xlarge", BUCKETS),
    "deberta_v3": ("deberta-v3-small", BUCKETS),
    "disentangled": ("disentangled-small", {"embedding_width": 16, **BUCKETS}),
    "performer": ("performer-small", {"features": 16, "redraw_every": 2}),
    "albert": ("albert-base", {"embedding_width": 16}),
    "modern": ("modern-small", {"neurons": 48, "window": 8}),
    "dynamic_conv": ("dynamicconv-base", {}),
    "light_conv": ("lightconv-base", {}),
    "universal": ("universal-base", {}),
}


def overrides(family: str, **changes: Any) -> str:
    """Setting that gives a preset the tiny size."""
    sizes = {**TINY, **FAMILIES[family][1], **changes}
    return f"model.overrides={{{','.join(f'{name}={value}' for name, value in sizes.items())}}}"


def fresh(family: str, **changes: Any) -> list[str]:
    """Settings of pre-training that choose a tiny network with random weights."""
    return [f"model.preset={FAMILIES[family][0]}", overrides(family, **changes)]


def continued(folder: str) -> list[str]:
    """Settings of pre-training that start from the weights of a folder."""
    return [f"model.folder={folder}"]


def layers_of(folder: str) -> list[str]:
    """Settings of pre-training that start from two layers of a folder's model."""
    return [*continued(folder), TWO_LAYERS]


TWO_LAYERS = "model.subnet={layers=[0,2]}"
TRANSLATION_MODEL = "model.overrides={width=32,layers=1,heads=2,neurons=64,max_length=64}"

# ---- commands
TRANSLATION = [TRANSLATION_MODEL, "tokenizer.vocabulary=300", "sequences={length=32,micro_tokens=256}"]
TRANSLATION += ["batch.tokens=512", "run={steps=8,log_every=1,evaluate_every=4}"]
TRANSLATION += ["task.generation={method='greedy',extra_length=2}"]
RECIPE = """
[sequences]
length = 32
micro_tokens = 256
[batch]
tokens = 512
[optimizer]
learning_rate = 2e-3
[schedule]
kind = "wsd"
[run]
steps = 6
log_every = 1
evaluate_every = 3
checkpoint_every = 2
evaluate_batches = 2
keep = 3
"""
TUNING = ["sequences.length=24", "batch.examples=16", "run.epochs=2", "run.log_every=1", "optimizer.learning_rate=2e-3"]
GRID = ["grid.widths=[1.0,0.5]", "grid.depths=[1.0,0.5]", "run.epochs=1", "importance.examples=32"]
EVERY_TERM = (
    'distillation.terms=[{kind="outputs"},{kind="labels"},{kind="hidden_states"},{kind="cosine"},{kind="attention"},'
)
EVERY_TERM += '{kind="relations"},{kind="patience"}]'
FIT = ["measure.repeats=1", "measure.finalists=3", "search.population=4", "search.generations=2"]
EXIT_RATE = "optimizer.learning_rate=2e-2"
REPLACED = ['objective={kind="replaced_tokens",optimizers="two"}', "generator.width=0.5"]


def with_settings(words: str, settings: Sequence[str]) -> list[str]:
    """Words of a command, followed by --set flags."""
    return [*words.split(), *(word for setting in settings for word in ("--set", setting))]


def pretrain(model: Sequence[str], *settings: str) -> list[str]:
    return with_settings("pretrain $data/recipe.toml --data $corpus --device cpu", [*model, *settings])


def finetune(task: str, *settings: str, model: str = "$pretrain_masked", flags: str = "") -> list[str]:
    return with_settings(f"finetune {model} --data $data/{task} --device cpu {flags}", [*TUNING, *settings])


def shrink(method: str, *settings: str, model: str = "$finetune_classification", flags: str = "") -> list[str]:
    batch = ["run.log_every=1", "optimizer.learning_rate=1e-3", "batch.examples=16"] if method != "vocabulary" else []
    words = f"shrink {model} --data $data/classification --method {method} --device cpu {flags}"
    return with_settings(words, [*batch, *settings])


def fit(model: str, flags: str) -> list[str]:
    return with_settings(f"fit {model} --data $data/classification --threads 1 --length 16 --fresh {flags}", FIT)


def answer(command: str, model: str, task: str, flags: str = "") -> list[str]:
    split = " --split dev" if command == "predict" else ""
    return f"{command} ${model} --data $data/{task} --device cpu{split} {flags}".split()


# Each job is a command without --out; $name is the output folder of another job, which runs first.
Job = str | list[str] | Callable[["Runner", Path], Any]
JOBS: dict[str, Job] = {
    "tokenizer": "tokenizer $data/texts --vocabulary 300",
    "tokenizer_bytes": "tokenizer $data/texts --kind bytes --vocabulary 300",
    "tokenizer_unigram": "tokenizer $data/texts --kind unigram --vocabulary 310",
    "tokenizer_extended": "tokenizer $data/texts --extend $tokenizer_small --tokens 20",
    "tokenizer_small": "tokenizer $data/texts --vocabulary 120",
    "corpus": "corpus $data/texts --tokenizer $tokenizer --held-out 0.1 --workers 1",
    "pairs": "pairs $data/texts --min-words 3",
    # pre-training: objectives, families, starting points
    "pretrain_masked": pretrain(fresh("bert"), "objective.masking={rate=0.2,unit='word'}"),
    "pretrain_next_sentence": pretrain(
        fresh("bert"), "sequences.cut=sentence_pairs", 'objective={kind="masked_lm",next_sentence=true}'
    ),
    "pretrain_causal": pretrain(fresh("bert"), 'objective={kind="causal_lm"}'),
    "pretrain_masked_and_causal": pretrain(
        fresh("deberta_v2"), 'objective={kind="masked_and_causal",causal_weight=0.5}'
    ),
    "pretrain_electra": pretrain(fresh("electra"), "sequences.cut=segments", *REPLACED),
    "pretrain_convbert": pretrain(fresh("convbert"), *REPLACED, "generator.sharing=gradient_disentangled"),
    "pretrain_deberta": pretrain(fresh("deberta")),
    "pretrain_deberta_v3": pretrain(fresh("deberta_v3"), 'objective={kind="replaced_tokens"}', "generator.depth=0.5"),
    "pretrain_performer": pretrain(fresh("performer")),
    "pretrain_albert": pretrain(fresh("albert")),
    "pretrain_modern": pretrain(
        fresh("modern"), "optimizer.kind=stable_adamw", "optimizer.clip=0", "schedule.kind=cosine"
    ),
    "pretrain_universal": pretrain(fresh("universal")),
    "pretrain_padded": pretrain(fresh("bert"), "sequences.layout=padded", "run.average_last=2"),
    "pretrain_phases": pretrain(fresh("bert"), "phases=[{begin=0.5,length=64,micro_tokens=512,batch_tokens=1024}]"),
    "pretrain_budget": [*pretrain(fresh("bert")), "--budget", "2k", "--seed", "7"],
    "pretrain_continued": pretrain(continued("$pretrain_masked")),
    "pretrain_continued_generator": pretrain(continued("$pretrain_electra"), REPLACED[0]),
    "pretrain_taught": pretrain(layers_of("$pretrain_masked"), "distillation.teacher=$pretrain_masked"),
    "pretrain_taught_states": pretrain(
        fresh("bert", width=16),
        "distillation.teacher=$pretrain_masked",
        'distillation.terms=[{kind="attention"},{kind="hidden_states"}]',
    ),
    "pretrain_branched": "pretrain --branch $pretrain_masked/checkpoints/step-00000004 --decay 3 --device cpu",
    "pretrain_resumed": lambda runner, out: resume_pretraining(runner, out),
    "compare": with_settings(
        "compare $data/recipe.toml $data/wide.toml --data $corpus --budget 2k --evaluations 2 --seeds 2 --device cpu",
        fresh("bert"),
    ),
    # fine-tuning: tasks and methods
    "finetune_classification": finetune("classification", "run.epochs=12", "optimizer.learning_rate=5e-3"),
    "finetune_fresh": finetune("classification", overrides("bert"), "tokenizer.vocabulary=300", model="bert-tiny"),
    "finetune_two_texts": finetune("two_texts", "task.both_orders=true", model="$pretrain_electra"),
    "finetune_multi_label": finetune("multi_label", model="$pretrain_convbert"),
    "finetune_regression": finetune("regression", model="$pretrain_deberta"),
    "finetune_tagging": finetune("tagging", model="$pretrain_deberta_v3"),
    "finetune_spans": finetune("spans", model="$pretrain_performer"),
    "finetune_choice": finetune("choice"),
    "finetune_embedding": finetune("embedding"),
    "finetune_embedding_scored": finetune("scored", flags="--task embedding"),
    "finetune_translation": with_settings(
        "finetune transformer-tiny --data $data/translation --task translation --device cpu",
        TRANSLATION,
    ),
    "finetune_sift": finetune("classification", flags="--adversarial sift"),
    "finetune_vat": finetune("classification", flags="--adversarial vat"),
    "finetune_taught": with_settings(
        "finetune --teacher $finetune_classification --data $data/classification --device cpu",
        [*TUNING, TWO_LAYERS, EVERY_TERM],
    ),
    "finetune_quantised": finetune(
        "classification", "quantisation={weight_bits=4,calibration=2}", model="$finetune_classification"
    ),
    "finetune_layer_decay": finetune("classification", "encoder.layer_decay=0.8", "batch.micro_examples=8"),
    "finetune_frozen": finetune("classification", "encoder.frozen=all", "head.features.layers=2"),
    "finetune_frozen_embedding": finetune("tagging", "encoder.frozen=embedding", "run.choose=last"),
    "finetune_search": finetune("classification", flags="--seeds 2 --learning-rates 1e-3 3e-3"),
    # answers
    "evaluate_classification": answer("evaluate", "finetune_classification", "classification"),
    "evaluate_spans": answer("evaluate", "finetune_spans", "spans"),
    "evaluate_embedding": answer("evaluate", "finetune_embedding", "embedding"),
    "evaluate_exits": answer("evaluate", "shrink_exits", "classification"),
    "evaluate_translation": answer("evaluate", "finetune_translation", "translation", "--beam 2 --extra-length 3"),
    "predict_classification": answer("predict", "finetune_classification", "classification"),
    "predict_tagging": answer("predict", "finetune_tagging", "tagging"),
    "predict_choice": answer("predict", "finetune_choice", "choice"),
    "predict_text": ["predict", "$finetune_regression", "--text", "the old clock", "--device", "cpu"],
    "predict_translation": ["predict", "$finetune_translation", "--text", "seven old lanterns", "--device", "cpu"],
    "predict_onnx": answer("predict", "export_onnx", "classification"),
    "predict_onnx_int8": answer("predict", "export_onnx_int8", "classification"),
    # shrinking
    "shrink_elastic": shrink("elastic", *GRID, 'stages=["width","depth","labels"]'),
    "shrink_elastic_sampled": shrink("elastic", *GRID, "grid.sample=1", "grid.per_layer=true", "order=random"),
    "shrink_elastic_augmented": shrink(
        "elastic", *GRID, 'stages=["width"]', "augmentation.copies=1", flags="--augment $pretrain_masked"
    ),
    "shrink_prune": shrink("prune", "run.epochs=1", "importance.examples=32", flags="--keep 0.5"),
    "shrink_prune_layers": shrink("prune", "run.epochs=1", "prune.scope=layer", 'recovery.terms=[{kind="labels"}]'),
    "shrink_prune_magnitude": shrink("prune", "prune={by='magnitude',counts='parameters',step=1.0}", "run.epochs=1"),
    "shrink_prune_gradual": shrink("prune", "prune.step=0.25", "recovery={between=1.0,after=0.0}"),
    "shrink_prune_gates": shrink("prune", "prune.by=l0", "gates.epochs=2.0", "run.epochs=1"),
    "shrink_exits": shrink("exits", "run.epochs=6", "leave.thresholds=[0.3,0.5]", EXIT_RATE, flags="--tolerance 50"),
    "shrink_exits_joint": shrink("exits", "run.epochs=1", "encoder=joint", "learn_from=labels", "weighting=by_depth"),
    "shrink_vocabulary": shrink("vocabulary", "vocabulary.repair_steps=5", flags="--tokens 150 --rank 8"),
    "fit_layers": fit("$shrink_elastic_sampled", "--latency-ms 5 --engine torch --precision float32 --subnets layers"),
    "fit_onnx": fit("$shrink_elastic", "--latency-ms 4 --engine onnxruntime --precision float32 --subnets even"),
    "fit_score": fit("$finetune_classification", "--at-least 10 --prefer small --engine torch --vocabulary cut"),
    "fit_nothing": fit("$finetune_classification", "--latency-ms 0.5 --engine torch --precision float32"),
    # exchange and views
    "export_hf": "export $pretrain_masked",
    "export_hf_own": "export $pretrain_masked --native never",
    "export_hf_task": "export $finetune_classification",
    "export_hf_deberta": "export $finetune_regression",
    "export_hf_generator": "export $pretrain_electra --part generator",
    "export_hf_sentences": "export $finetune_embedding",
    "export_hf_subnet": "export $shrink_elastic --width 0.5 --depth 0.5",
    "export_onnx": "export $finetune_classification --to onnx --data $data/classification",
    "export_onnx_masked": "export $pretrain_masked --to onnx --head masked_tokens",
    "export_onnx_int8": "export $finetune_classification --to onnx --precision int8",
    "export_onnx_static": "export $shrink_prune --to onnx --precision int8_static --data $data/classification",
    "export_onnx_subnet": "export $shrink_elastic --to onnx --width 0.5",
    "import_hf": "import $export_hf",
    "import_hf_task": "import $export_hf_task",
    "inspect_text": ["inspect", "$pretrain_masked", "--text", "The smith forges an iron gate."],
    "inspect_pair": ["inspect", "$finetune_two_texts", "--text", "The smith forges.", "--pair", "The clerk weighs."],
    "inspect_texts": "inspect $pretrain_masked $finetune_classification --texts $data/lines.txt --sentences 20",
    "python_build": lambda runner, out: built_models(),
    "python_load": lambda runner, out: loaded_models(runner),
}


# ---- jobs in Python
def resume_pretraining(runner: "Runner", out: Path) -> None:
    """Remove the end of a finished run, then resume from its last checkpoint but one."""
    shutil.copytree(runner["pretrain_masked"], out)
    for name in ("result.json", "model.safetensors"):
        (out / name).unlink()
    shutil.rmtree(max((out / "checkpoints").glob("step-*")))
    run_command(["pretrain", "--resume", "--device", "cpu", "--out", str(out)])


def built_models() -> dict[str, Any]:
    """Random weights and hidden states of every family."""
    found = {}
    tokens = torch.arange(60).view(2, 30) % 50 + 5
    for family, (preset, changes) in FAMILIES.items():
        model = bertsmith.build(bertsmith.preset(preset, vocabulary=60, **{**TINY, **changes}), seed=3).eval()
        with torch.no_grad():
            tensors = {**model.state_dict(), "(hidden states)": model(tokens)}
        found[family] = {name: tensor_hash(tensor) for name, tensor in tensors.items()}
    return found


def loaded_models(runner: "Runner") -> dict[str, Any]:
    """Vectors, filled masks, details of answers, and a sub-network, by the public Python names."""
    texts = ["the old clerk forgets", "seven lanterns near the harbour"]
    model = bertsmith.load(runner["pretrain_masked"])
    subnet = bertsmith.load(runner["shrink_elastic"], subnet=bertsmith.Subnet(width=0.5, depth=0.5))
    predictor = bertsmith.Predictor.load(runner["finetune_classification"])
    return {
        "encode": tensor_hash(model.encode(texts)),
        "fill_mask": repr(model.fill_mask("the smith [MASK] an iron gate.", top_k=3)),
        "subnet": {name: tensor_hash(tensor) for name, tensor in subnet.state_dict().items()},
        "details": repr(predictor.details(texts)),
    }


# ---- data
def write_data(folder: Path) -> None:
    """Write generated texts, a folder of rows for each task, and recipes."""
    subjects = ["the smith", "a traveller", "the old clerk", "my neighbour", "the captain"]
    verbs = ["forges", "carries", "repairs", "forgets", "describes", "weighs"]
    objects = ["an iron gate", "the letter", "seven lanterns", "a broken clock", "the heavy anvil", "nothing at all"]
    positions = ["by the river", "in the cold workshop", "near the harbour", "before sunrise"]

    def sentence(k: int) -> str:
        return " ".join([subjects[k % 5], verbs[k // 2 % 6], objects[k // 3 % 6], positions[k // 5 % 4]])

    stories = [[f"{sentence(7 * i + 13 * j).capitalize()}." for j in range(3 + i % 9)] for i in range(120)]
    write(folder / "texts" / "stories.txt", "\n\n".join(" ".join(story) for story in stories))
    write(folder / "lines.txt", "\n".join(sentence(11 * i) for i in range(30)))
    write(folder / "recipe.toml", RECIPE)
    write(folder / "wide.toml", RECIPE.replace("tokens = 512", "tokens = 1024"))
    tasks: dict[str, Callable[[int, str], Mapping[str, Any]]] = {
        "classification": lambda i, text: {"text": text, "label": text.split()[3 if i % 4 else 1][:1]},
        "two_texts": lambda i, text: {"sentence1": text, "sentence2": sentence(i // 2), "label": i % 2},
        "multi_label": lambda i, text: {"text": text, "label": ["iron", "time", "light"][i % 2 : 1 + i % 4]},
        "regression": lambda i, text: {"text": text, "label": 0.25 * (i % 9)},
        "tagging": lambda i, text: {"tokens": text.split(), "ner": tags(text)},
        "spans": lambda i, text: {"id": str(i), "question": "which thing?", "context": text, "answers": span(i, text)},
        "choice": lambda i, text: {"context": text, "question": "what?", "choices": objects[:3], "label": i % 3},
        "embedding": lambda i, text: {"anchor": text, "positive": " ".join(text.split()[1:])},
        "scored": lambda i, text: {"sentence1": text, "sentence2": sentence(i + i % 4), "label": 1 - i % 4 / 4},
        "translation": lambda i, text: {"forth": text, "back": " ".join(reversed(text.split()))},
    }

    def tags(text: str) -> list[str]:
        return ["B-PER" if word in ("smith", "clerk", "captain") else "O" for word in text.split()]

    def span(i: int, text: str) -> dict[str, Any]:
        thing = objects[(3 * i + i // 6) // 3 % 6]
        return {"text": [thing], "answer_start": [text.index(thing)]}

    for task, row in tasks.items():
        rows = [row(i, sentence(3 * i + i // 6)) for i in range(64)]
        for split, own in (("train", rows[:48]), ("dev", rows[48:])):
            write(folder / task / f"{split}.jsonl", "".join(json.dumps(one) + "\n" for one in own))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ---- content of output folders
VOLATILE = {"seconds", "translation_seconds", "tokens_per_second", "megabytes_per_second", "data_wait"}
VOLATILE |= {"at", "versions", "machine", "peak_memory_mb"}
TIMES = {"latency_ms"}  # measured, except in fit
SKIPPED = {".html", ".png", ".md", ".toml"}


def tensor_hash(tensor: Any) -> str:
    """Dtype, shape and a hash of the bytes."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    else:
        data = np.ascontiguousarray(tensor).tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def content_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def onnx_tensors(path: Path) -> list[Any]:
    """Initialisers of a graph."""
    import onnx

    return [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]


def safe_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def stored_numbers(folder: Path) -> int:
    """Number of elements of all weights in a folder."""
    found = sum(tensor.numel() for path in folder.glob("*.safetensors") for tensor in safe_tensors(path).values())
    return found + sum(int(array.size) for path in folder.glob("*.onnx") for array in onnx_tensors(path))


def normalised(value: Any, work: str, volatile: set[str]) -> Any:
    """JSON content without volatile fields and without the path of the work folder."""
    if isinstance(value, dict):
        return {key: normalised(one, work, volatile) for key, one in value.items() if key not in volatile}
    if isinstance(value, list):
        return [normalised(one, work, volatile) for one in value]
    return value.replace(work, "WORK") if isinstance(value, str) else value


def file_content(path: Path, work: str, volatile: set[str]) -> Any:
    """Comparable content of one file."""
    if path.suffix == ".safetensors":
        return {name: tensor_hash(tensor) for name, tensor in sorted(safe_tensors(path).items())}
    if path.suffix == ".onnx":  # names of initialisers may depend on the exporter
        return sorted(tensor_hash(array) for array in onnx_tensors(path))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: tensor_hash(arrays[name]) for name in sorted(arrays)}
    if path.suffix == ".json" and path.name != "tokenizer.json":
        return normalised(json.loads(path.read_text(encoding="utf-8")), work, volatile)
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        return [normalised(json.loads(line), work, volatile) for line in lines]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def folder_content(folder: Path, work: str, volatile: set[str]) -> dict[str, Any]:
    """Comparable content of all files in a folder, checkpoints and pages left out."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in SKIPPED]
    paths = [path for path in paths if "checkpoints" not in path.parts and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): file_content(path, work, volatile) for path in paths}


# ---- running and comparing
class Runner(dict[str, Path]):
    """Output folders by job; a job runs when its folder is first requested."""

    def __init__(self, work: Path) -> None:
        super().__init__(data=work / "data")
        self.work = work
        self.content: dict[str, dict[str, Any]] = {}

    def __missing__(self, name: str) -> Path:
        job, out = JOBS[name], self.work / name
        words = job.split() if isinstance(job, str) else [] if callable(job) else job
        words = [Template(word).substitute(self) for word in words]  # runs the jobs that this one needs
        begin, printed = time.perf_counter(), io.StringIO()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        found: Any = None
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                found = job(self, out) if callable(job) else run_command([*words, "--out", str(out)])
        except SystemExit as error:
            found = {"exit_code": error.code}
            if error.code != 1 or not name.startswith("fit"):  # fit exits with 1 if no candidate meets the budget
                found["error"] = printed.getvalue().strip().replace(str(self.work), "WORK")[-500:]
        except Exception:
            found = {"error": traceback.format_exc()[-1500:]}
        volatile = VOLATILE if name.startswith("fit") else VOLATILE | TIMES
        self.content[name] = {} if found is None else {"(returned)": found}
        self.content[name] |= folder_content(out, str(self.work), volatile)
        error = found.get("error") if isinstance(found, dict) else None
        print(f"{time.perf_counter() - begin:6.1f} s  {name}" + (f"  FAILED\n{error}" if error else ""), flush=True)
        self[name] = out
        return out


def differences(before: Any, after: Any, path: str) -> list[str]:
    """One line for every value that differs."""
    if json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True):  # NaN equals NaN, 1 is not 1.0
        return []
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = ({f"[{i}]": one for i, one in enumerate(values)} for values in (before, after))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [f"{path}: {str(before)[:100]} -> {str(after)[:100]}"]
    pairs = {key: (before.get(key, "(absent)"), after.get(key, "(absent)")) for key in {**before, **after}}
    return [line for key, pair in pairs.items() for line in differences(*pair, f"{path} {key}")]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Print what differs, file by file; return the files that differ."""
    found = []
    for job in {**before, **after}:
        own, other = before.get(job, {}), after.get(job, {})
        for file in {**own, **other}:
            lines = differences(own.get(file, "(absent)"), other.get(file, "(absent)"), f"{job}/{file}")
            found += [f"{job}/{file}"] if lines else []
            more = [f"    and {len(lines) - 8} more"] if len(lines) > 8 else []
            for line in [*lines[:8], *more]:
                print(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="file to write")
    parser.add_argument("--compare", type=Path, help="file of an earlier --save")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs to run, with those they need; all by default")
    parser.add_argument("--work", type=Path, help="empty folder for all outputs; a temporary one by default")
    parser.add_argument("--list", action="store_true", help="print the job names")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(JOBS))
        return 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fix_measurements()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        write_data(work / "data")
        runner = Runner(work)
        for name in arguments.only or JOBS:
            runner[name]
    content = json.loads(json.dumps(runner.content))
    hashes = {job: content_hash(files) for job, files in content.items()}
    failed = [job for job, files in content.items() if "error" in files.get("(returned)", {})]
    print("\n".join(f"{value}  {job}" for job, value in hashes.items()))
    if arguments.save:
        saved = {"torch": torch.__version__, "hashes": hashes, "content": content}
        arguments.save.write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    differing: list[str] = []
    if arguments.compare:
        saved = json.loads(arguments.compare.read_text(encoding="utf-8"))
        if saved["torch"] != torch.__version__:
            print(f"saved with PyTorch {saved['torch']}, this is {torch.__version__}: differences are to be expected")
        before = {job: files for job, files in saved["content"].items() if job in content or not arguments.only}
        differing = compare(before, content)
        weights = sum(name.endswith((".safetensors", ".onnx")) for name in differing)
        print(f"{len(differing)} files differ, {weights} of them weights")
    print(f"{len(content)} jobs, {len(failed)} failed {' '.join(failed)}")
    return int(bool(failed or differing))


if __name__ == "__main__":
    sys.exit(main())
