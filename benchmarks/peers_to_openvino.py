"""Convert a float16 GGUF file to OpenVINO's format, and compress it. Runs in the peers' environment.

python peers_to_openvino.py convert F16.gguf OUT_FOLDER        by OpenVINO GenAI's GGUF reader
python peers_to_openvino.py compress FOLDER OUT_FOLDER int8|int4
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nncf
import openvino
import openvino_genai


def to_openvino(source: Path, out: Path) -> None:
    """Write a folder with model and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    copy = out / source.name
    copy.unlink(missing_ok=True)
    copy.symlink_to(source.resolve())  # the pipeline saves its model next to this file
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()


def compress(source: Path, out: Path, kind: str) -> None:
    """As Optimum's command line: int8, or int4 in groups of 128 with the head in int8."""
    modes = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128},
    }
    model = openvino.Core().read_model(source / "openvino_model.xml")
    shutil.copytree(source, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("openvino_model.*"))
    openvino.save_model(nncf.compress_weights(model, **modes[kind]), out / "openvino_model.xml")


def main() -> None:
    actions = {"convert": to_openvino, "compress": compress}
    action, source, out, *more = sys.argv[1:]
    actions[action](Path(source), Path(out), *more)


if __name__ == "__main__":
    main()
