"""Kernels are compiled once per model, not once per shape of a batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.ops import kernel_support as support

SCRIPT = Path(__file__).with_name("launch_variants.py")
DIRECTIONS = {"positions._products", "positions._table_partial", "depthwise_kernels._convolve"}
"""Compiled for queries and for keys, or for the output and for the gradient."""


@pytest.mark.skipif(not support.HAS_TRITON, reason="needs Triton")
def test_batches_of_other_shapes_compile_no_more_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # a process of its own, because here kernels may be interpreted
    result = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True)
    variants = json.loads(result.stdout)
    assert len(variants) == 25
    for name, count in variants.items():
        assert count == (2 if name.endswith(tuple(DIRECTIONS)) else 1), name
