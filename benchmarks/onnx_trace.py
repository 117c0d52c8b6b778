"""CPU time of tracing a model to ONNX as a whole, and stacked from layers that are traced once.

python benchmarks/onnx_trace.py small
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines import onnx_trace
from bertsmith.engines.base import Inputs
from bertsmith.engines.onnx_graph import feed, write_graph
from bertsmith.engines.onnx_session import open_session
from bertsmith.models.model import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="small")
    model = bertsmith.load(parser.parse_args().model).eval()
    half = bertsmith.extract(model, bertsmith.Subnet(depth=0.5))
    separates = onnx_trace.has_separate_layers
    outputs = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for name, network, is_stacked in (
            ("whole network, traced as a whole", model, False),
            ("whole network, layers traced once", model, True),
            ("half the depth, from the same trace", half, True),
            ("half the depth, traced as a whole", half, False),
        ):
            onnx_trace.has_separate_layers = separates if is_stacked else lambda config, head: False
            print(f"{name:40}{_cpu_seconds(network, path):6.1f} s", flush=True)
            outputs.append(_outputs(network, path))
    for one, other in ((0, 1), (2, 3)):
        print(f"largest difference of the outputs: {np.abs(outputs[one] - outputs[other]).max():g}")


def _cpu_seconds(model: Model, path: Path) -> float:
    start = time.process_time()
    write_graph(model, path, None)
    return time.process_time() - start


def _outputs(model: Model, path: Path) -> np.ndarray:
    tokens = torch.randint(0, model.config.encoder.vocabulary, (3, 40), generator=torch.Generator().manual_seed(0))
    inputs = Inputs(tokens, SequenceLayout.full(3, 40))
    return open_session(path, 1).run(None, feed(inputs, onnx_trace.input_names(model.config)))[0]


if __name__ == "__main__":
    main()
