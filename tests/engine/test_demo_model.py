"""The real demo model: the packaged file is converted, and the result knows its geography."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openengine_vllm.demo_model import ensure_demo_model


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines: list[str] = []
    directory = ensure_demo_model(tmp_path_factory.mktemp("models") / "demo", lines.append)
    assert lines
    return directory


def test_folder_is_what_vllm_loads(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert json.loads((demo_model / "generation_config.json").read_text())["temperature"] == 0


def test_weights_and_tokenizer_fit_each_other(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_chat_template_is_the_models_own(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where is Paris?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(text, str)
    assert text.endswith("<|im_start|>user\nWhere is Paris?<|im_end|>\n<|im_start|>assistant\n")


KILLABLE = """
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path
from openengine_vllm.demo_model import ensure_demo_model

start = SpawnProcess.start

def start_and_tell(process):
    start(process)
    print(process.pid, flush=True)

SpawnProcess.start = start_and_tell
ensure_demo_model(Path(sys.argv[1]), lambda line: None)
"""


def test_conversion_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLABLE, str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        converter = psutil.Process(int(process.stdout.readline()))
        process.kill()
    converter.wait(timeout=120)
    assert not (tmp_path / "demo").exists()
