"""The promises of SECURITY.md about hostile files: no path outside the folder, bounded memory, localhost by default."""

import inspect
import json
import os
import resource
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors.torch import save_file

import bertsmith
from bertsmith.checkpoint.files import check_size, read_tensors
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.text.readers import find_files, read_documents
from bertsmith.training.log import read_log


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "index.json", "model.bin", 3, None])
def test_weight_map_names_only_weights_of_its_folder(tmp_path: Path, name: object) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(InputError, match=r"allowed: a \.safetensors file in the same folder"):
        read_tensors(folder / "index.json")


@pytest.mark.parametrize("weight_map", [[], 2, {}, "model.safetensors"])
def test_weight_map_of_another_type_raises(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match="lists no weight files"):
        read_tensors(tmp_path / "index.json")


def test_small_archive_does_not_fill_the_memory(tmp_path: Path) -> None:
    """131 kB that decompress to 2 GB in one line are rejected at the limit of a line."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    with (tmp_path / "texts.txt.zst").open("wb") as file:
        for _ in range(200):
            file.write(compressor.compress(bytes(1 << 20)))
        file.write(compressor.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="line 1 is longer than 64 MB"):
        list(read_documents([tmp_path / "texts.txt.zst"]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # kB


def test_files_that_block_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "texts.txt")
    with pytest.raises(InputError, match="is neither a file nor a folder"):
        find_files([tmp_path / "texts.txt"])
    with pytest.raises(InputError, match="is not a regular file"):
        list(read_documents([tmp_path / "texts.txt"]))


def test_network_much_larger_than_its_weights_is_not_built(tmp_path: Path) -> None:
    config = bertsmith.preset("bert-tiny", vocabulary=30, width=8, layers=1, heads=2, max_length=8).plain()
    layer = config["encoder"]["layers"][0]
    with pytest.raises(InputError, match="repeat is 1000000; allowed: 1 to 1024"):
        ModelConfig.parse({**config, "encoder": {**config["encoder"], "layers": [{**layer, "repeat": 1_000_000}]}})
    config["encoder"]["vocabulary"] = 1 << 40
    with pytest.raises(InputError, match=r"config.json' describes a network of [\d,]+ numbers, but the weights have 1"):
        check_size(ModelConfig.parse(config), {"weight": torch.zeros(1)}, tmp_path)
    config["encoder"]["vocabulary"] = 1 << 63
    with pytest.raises(InputError, match=r"config.json' describes a network that cannot exist"):
        check_size(ModelConfig.parse(config), {"weight": torch.zeros(1)}, tmp_path)


def test_service_listens_on_this_machine_by_default() -> None:
    assert inspect.signature(bertsmith.serve).parameters["host"].default in ("127.0.0.1", "localhost")


def test_rows_of_a_damaged_log_are_read_up_to_the_damage(tmp_path: Path) -> None:
    row = {"kind": "training", "step": 1, "loss": 2.0}
    for damage in ("[]", '{"step": 2}', '{"kind": 1, "step": 2}', "[" * 100_000, '{"kind": "tra'):
        (tmp_path / "log.jsonl").write_text(f"{json.dumps(row)}\n{damage}\n{json.dumps(row)}\n")
        assert read_log(tmp_path / "log.jsonl") == [row]
