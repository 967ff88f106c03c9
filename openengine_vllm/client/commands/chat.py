"""Where `generate --chat` finds a model's chat template, and what it makes of a prompt.

Kept apart from the template itself, because the places to look are the command's own choice:
a folder that is named, the one that the engine loaded, or the hub.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from openengine_vllm.client import Client
from openengine_vllm.client.commands.running import UsageError
from openengine_vllm.client.requests import Prompt
from openengine_vllm.protocol import v1 as pb


async def chat_prompt(
    client: Client, prompt: Prompt, system: str | None, model: str | None, folder: Path | None
) -> list[int]:
    """The token ids of a conversation with one question. Raises UsageError."""
    # The template engine and the tokenizer take longer to import than a health check to run.
    from openengine_vllm.client.chat_template import ChatTemplateError, load_chat_tokenizer

    if folder is None:
        model_id = (await _model_info(client, model)).model_id
        folder = await asyncio.to_thread(_find_folder, model_id)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": str(prompt)})
    try:
        return load_chat_tokenizer(folder).encode(messages)
    except ChatTemplateError as error:
        raise UsageError(str(error)) from error


async def _model_info(client: Client, model: str | None) -> pb.ModelInfo:
    if model is None:
        models = (await client.engine_info()).supported_models
        if not models:
            raise UsageError("the engine names no model; use --tokenizer")
        model = models[0]
    return await client.model_info(model)


def _find_folder(model_id: str) -> Path:
    """The folder of a model that an engine named by its path or by its name on the hub."""
    from openengine_vllm.client.chat_template import FILES

    if Path(model_id).is_dir():
        return Path(model_id)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"the engine's model {model_id!r} is not a folder on this machine, and "
            "huggingface_hub is not installed; use --tokenizer"
        ) from None
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the engine's model {model_id!r} is neither a folder on this machine nor to be had "
            f"from the hub; use --tokenizer ({type(error).__name__})"
        ) from error
