"""Tiny random models, made where the tests run, so that the tests need no download.

Each maker fills an empty folder with what vLLM loads, the same bytes every time for the same
release of transformers. `model_dir` is what tests call: it makes a model once and keeps it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

DIRECTORY_VARIABLE = "OPENENGINE_TEST_MODELS"
"""Names the folder that keeps the models; by default it is one in the temporary folder."""

VOCAB_SIZE = 1024
MAX_POSITIONS = 2048

BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID, THINK_ID, THINK_END_ID = range(7)
SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|think|>",
    "<|/think|>",
)
"""The first ids of the vocabulary, in this order; the 256 single bytes come next."""

THINK, THINK_END = "<think>", "</think>"
"""The markers of tiny_llama_thinking."""

FIRST_BYTE_ID = len(SPECIAL_TOKENS)
"""The token "!", the lowest of the bytes."""

MULTI_EOS_IDS = (EOS_ID, IM_END_ID, FIRST_BYTE_ID)
"""The EOS set of tiny_llama_multi_eos: the primary, another special token, and a plain one."""

MULTI_EOS_TEMPERATURE = 0.6
"""The temperature that tiny_llama_multi_eos has when a request names none."""

ADAPTER_RANK = 8
"""The rank of the adapters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ROOT = Path(__file__).resolve().parents[2]
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n"
    "Größe, façade, naïve, Ångström, smørrebrød, żółć, čeština.\n"
    "Съешь ещё этих мягких французских булок, да выпей чаю.\n"
    "速い茶色の狐が怠け者の犬を飛び越える。 敏捷的棕色狐狸跳过懒狗。\n"
    '{"name": "fox", "legs": 4, "quick": true, "colour": null, "speed": [1.5, 2e3]}\n'
    "👩‍👩‍👧 🏳️‍🌈 🇪🇺 👍🏽 and 1234567890 + 42 = 1234567932\n"
)


def tiny_llama(directory: Path) -> None:
    """A Llama of two layers and 0.6 million weights, bfloat16, over byte-level BPE.

    The tokenizer puts BOS before a plain text, and not before a rendered chat. Any byte can
    come next at any time, so random continuations end inside characters. In bfloat16 two
    tokens often tie for the first place, and the rounding of a batch then decides: serve with
    `--dtype float32` where greedy output has to be the same in every batch.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        # Five times the usual, under which all tokens come out about equally likely.
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    _save_tokenizer(directory)


def tiny_llama_multi_eos(directory: Path) -> None:
    """tiny_llama with three EOS ids and a temperature of its own in generation_config.json."""
    tiny_llama(directory)
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {
        "do_sample": True,
        "eos_token_id": list(MULTI_EOS_IDS),
        "temperature": MULTI_EOS_TEMPERATURE,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def tiny_llama_thinking(directory: Path) -> None:
    """tiny_llama whose tokens around reasoning have the names that most models give them."""
    tiny_llama(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = directory / name
        text = path.read_text(encoding="utf-8")
        path.write_text(
            text.replace(SPECIAL_TOKENS[THINK_ID], THINK).replace(
                SPECIAL_TOKENS[THINK_END_ID], THINK_END
            ),
            encoding="utf-8",
        )


def tiny_llama_lora_a(directory: Path) -> None:
    """A LoRA adapter for tiny_llama, of rank ADAPTER_RANK, that changes what it says."""
    _adapter(directory, seed=1)


def tiny_llama_lora_b(directory: Path) -> None:
    """Another one."""
    _adapter(directory, seed=2)


def _adapter(directory: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for module, width in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (ADAPTER_RANK, 128)), ("B", (width, ADAPTER_RANK))):
                weights[f"{name}.lora_{part}.weight"] = 0.3 * torch.randn(
                    shape, generator=generator
                )
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


MAKERS: dict[str, Callable[[Path], None]] = {
    maker.__name__: maker
    for maker in (
        tiny_llama,
        tiny_llama_multi_eos,
        tiny_llama_thinking,
        tiny_llama_lora_a,
        tiny_llama_lora_b,
    )
}


@functools.cache
def model_dir(name: str) -> Path:
    """The folder of the named model, made by its entry in MAKERS unless it is there already.

    The folder's name holds a digest of this module and of what it builds on, so a change
    makes new models. It appears whole; of two processes that make one at once, the first wins.
    """
    root = Path(
        os.environ.get(DIRECTORY_VARIABLE)
        or Path(tempfile.gettempdir()) / f"openengine-test-models-{os.getuid()}"
    )
    target = root / f"{name}-{_digest()}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=f".{name}."))
    try:
        MAKERS[name](scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _digest() -> str:
    digest = hashlib.sha256()
    for path in (Path(__file__), _ROOT / "LICENSE"):
        digest.update(path.read_bytes())
    for package in ("tokenizers", "torch", "transformers"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:12]


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (_ROOT / "LICENSE").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([*text.splitlines(keepends=True), _SENTENCES], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text gave a vocabulary of {tokenizer.get_vocab_size()} tokens")
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS_ID)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=list(SPECIAL_TOKENS[IM_START_ID:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    ).save_pretrained(directory)
